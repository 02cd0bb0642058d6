"""Fingerprints of models: one walk through the modules checks them and shows whether they changed since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dave_vit.engine.autograd_graph import checkpointing_error
from dave_vit.errors import training_error


@dataclass(frozen=True)
class Fingerprint:
    """State of a model.

    Attributes:
        structure: changes when a module, a parameter, a buffer or a setting of the model is replaced.
        settings: changes with the structure, with whole numbers among the settings, and where parameters move.
        numbers: changes with the structure, and when the numbers of a parameter or a buffer change.
        hooked: whether a module has hooks on its forward pass.
    """

    structure: int
    settings: int
    numbers: int
    hooked: bool


_CACHE: ContextVar[dict[nn.Module, Fingerprint] | None] = ContextVar("fingerprints", default=None)


@contextmanager
def cache_fingerprints() -> Iterator[None]:
    """Cache fingerprints inside of the context, until a model runs code of its own."""
    token = _CACHE.set({})
    try:
        yield
    finally:
        _CACHE.reset(token)


def forget_fingerprints() -> None:
    """Clear the cache; called before a model's own code runs, which may change anything."""
    cache = _CACHE.get()
    if cache is not None:
        cache.clear()


def fingerprint_model(model: nn.Module) -> Fingerprint:
    """Compute the fingerprint of a model, or return the cached one.

    Raises:
        TrainingModeError: it acts at random, or learns while it runs.
        CheckpointingError: it recomputes its forward pass.
    """
    cache = _CACHE.get()
    if cache is None:
        return _walk_modules(model)
    if model not in cache:
        cache[model] = _walk_modules(model)
    return cache[model]


def _walk_modules(model: nn.Module) -> Fingerprint:
    structure: list[Any] = []
    counts: list[int] = []  # settings that models count with
    places: list[int] = []
    numbers: list[tuple[int, int]] = []
    hooked = False
    for module in model.modules():
        _check(model, module)
        hooked = hooked or bool(module._forward_hooks or module._forward_pre_hooks)
        structure.append(id(module))
        for value in vars(module).values():
            kind = type(value)
            if kind is int:
                counts.append(value)
            elif kind is bool or kind is float or kind is str:
                structure.append(value)
        for tensor in module._parameters.values():
            structure.append(id(tensor))
            if tensor is not None:
                places.append(tensor.data_ptr())
                numbers.append((places[-1], _version(tensor)))
        for buffer in module._buffers.values():
            structure.append(id(buffer))
            if buffer is not None:
                numbers.append((buffer.data_ptr(), _version(buffer)))
    same = hash(tuple(structure))
    return Fingerprint(same, hash((same, *places, *counts)), hash((same, *numbers)), hooked)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _check(model: nn.Module, module: nn.Module) -> None:
    """Raise for a module that acts at random, learns while it runs, or recomputes its forward pass."""
    declared = "grad_checkpointing" in vars(module) or hasattr(type(module), "grad_checkpointing")
    if declared and getattr(module, "grad_checkpointing", False) is True:  # modules are slow to say that they have none
        raise checkpointing_error()
    if not module.training:
        return
    if getattr(module, "gradient_checkpointing", False) is True:
        raise checkpointing_error()
    rate = getattr(module, "p", 0.0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
    rate = max(rate or 0.0, getattr(module, "drop_prob", 0.0) or 0.0)
    if rate > 0.0 or isinstance(module, nn.modules.batchnorm._BatchNorm):
        name = next(name for name, other in model.named_modules() if other is module)
        raise training_error(f"{type(module).__name__} {name!r}")
