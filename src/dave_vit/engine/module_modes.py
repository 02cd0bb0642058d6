"""Modes of modules in which a model cannot be explained."""

from torch import nn

from dave_vit._internal.torch_private import BatchNorm, Dropout
from dave_vit.engine.autograd_graph import checkpointing_error
from dave_vit.errors import offload_error, training_error


def check_module(model: nn.Module, module: nn.Module) -> None:
    """Raise for a module that acts at random, learns while it runs, or recomputes its forward pass."""
    declared = "grad_checkpointing" in vars(module) or hasattr(type(module), "grad_checkpointing")
    if declared and getattr(module, "grad_checkpointing", False) is True:  # modules are slow to say that they have none
        raise checkpointing_error()
    if getattr(getattr(module, "_hf_hook", None), "offload", False):  # of accelerate
        raise offload_error()
    if not module.training:
        return
    if getattr(module, "gradient_checkpointing", False) is True:
        raise checkpointing_error()
    rate = getattr(module, "p", 0.0) if isinstance(module, Dropout) else 0.0
    rate = max(rate or 0.0, getattr(module, "drop_prob", 0.0) or 0.0)
    if rate > 0.0 or isinstance(module, BatchNorm):
        name = next(name for name, other in model.named_modules() if other is module)
        raise training_error(f"{type(module).__name__} {name!r}")
