"""One forward pass of a model, intercepted or plain, with checks of the model and its inputs."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dave_vit._internal.precision import working_dtype
from dave_vit._internal.torch_private import force_eager
from dave_vit.engine.autograd_graph import check_graph, hidden_error
from dave_vit.engine.calls import RANDOM_FUNCTIONS, RandomDraws
from dave_vit.engine.fingerprint import check_modes, forget_fingerprints
from dave_vit.engine.interception import Interception
from dave_vit.engine.operators import function_name
from dave_vit.engine.states import is_known
from dave_vit.engine.targets import class_logits
from dave_vit.errors import InputError, OutputError, UnsupportedOperator

Read = Callable[[Any, int], Tensor]
"""``read(output, batch)``: what is read from a model's output, ``[B, classes]``; see ``Target.read``."""


class PassCount:
    """Counter of forward passes; each pass of each image counts as one."""

    passes = 0


_COUNT: ContextVar[PassCount | None] = ContextVar("passes", default=None)


@contextlib.contextmanager
def count_passes() -> Iterator[PassCount]:
    """Count the forward passes inside; those that only check a model (``soundness``) are left out."""
    count = PassCount()
    token = _COUNT.set(count)
    try:
        yield count
    finally:
        _COUNT.reset(token)


def record_pass(inputs: Tensor) -> None:
    """Count the images of a batch that goes forward."""
    count = _COUNT.get()
    if count is not None:
        count.passes += len(inputs)


class HoldDraws(TorchFunctionMode):
    """Context in which random functions draw from generators of its own, and plain forward passes repeat their draws.

    Args:
        seed: of the generators.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._draws = RandomDraws(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bind random functions to the generators of this pass; all others run as they are."""
        is_random = function_name(func).name in RANDOM_FUNCTIONS
        return (self._draws.bind(func) if is_random else func)(*args, **(kwargs or {}))


def prepare_model(model: nn.Module) -> nn.Module:
    """Return the model to run, without torch.compile, after checking that it is deterministic."""
    model = getattr(model, "_orig_mod", model)  # torch.compile hides the functions from the interception
    check_modes(model)
    return model


def forward(
    model: Callable[[Tensor], Any],
    inputs: Tensor,
    mode: Interception,
    autocast: torch.dtype | None,
    read: Read = class_logits,
) -> tuple[Tensor, Tensor]:
    """Return the inputs as a leaf of the graph, and the logits under the interception.

    The logits are checked to depend on the inputs and to hold no foreign derivative. What reads them out of the model's
    output is intercepted as well: a score that divides by a norm holds it, as a layer of the model would.
    """
    record_pass(inputs)
    leaf = (inputs.clone() if inputs.is_inference() else inputs.detach()).requires_grad_()
    entered = leaf.clone()  # no leaf, so that it is not taken for a parameter; the model may write into it
    if isinstance(model, nn.Module):  # and no recording of it
        forget_fingerprints()
    with autocast_context(inputs, autocast), mode:
        logits = read(model(mode.enter(entered)), len(inputs))
    if not logits.requires_grad:
        raise _no_path_error(mode)
    if mode.rules.strict:
        if not is_known(logits):
            raise hidden_error("the output of the model")
        check_graph(logits, leaf)
    return leaf, logits


def autocast_context(inputs: Tensor, autocast: torch.dtype | None) -> torch.autocast:
    """Return a context with autocast to a type, or with the model's own precision."""
    return torch.autocast(inputs.device.type, dtype=autocast, enabled=autocast is not None)


def compute_logits(
    model: nn.Module, inputs: Tensor, read: Read = class_logits, autocast: torch.dtype | None = None
) -> Tensor:
    """Compute the logits, or what ``read`` selects from the output, without gradients and side effects."""
    check_modes(model)
    forget_fingerprints()
    record_pass(inputs)
    with isolate_pass(inputs), HoldDraws(), torch.no_grad(), autocast_context(inputs, autocast):
        return read(model(inputs), len(inputs))


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside; afterwards each of its modules is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def _no_path_error(mode: Interception) -> Exception:
    if mode.losses:
        last = " and ".join(mode.losses[-2:])  # the function that froze it, and the sum that took the rest along
        is_probability = any(name in last for name in ("softmax", "sigmoid"))
        advice = "return logits rather than probabilities" if is_probability else "use a supported function there"
        return UnsupportedOperator(
            f"no linear path leads from the input to the logits; it was lost at or before {last}: {advice}"
        )
    return OutputError("the logits do not depend on the input; is the model run under no_grad or from a cache?")


def check_inputs(inputs: Tensor) -> None:
    """Raise InputError for inputs that cannot be differentiated or would give a map of NaN."""
    if not isinstance(inputs, Tensor):
        raise InputError(f"inputs are of type {type(inputs).__name__}; give a float tensor [B, C, H, W]")
    if not inputs.is_floating_point():
        raise InputError(f"inputs have type {inputs.dtype}; give a float tensor, as model.preprocess returns it")
    if inputs.ndim < 2 or inputs.numel() == 0:
        raise InputError(f"inputs have shape {tuple(inputs.shape)}; give a batch of images [B, C, H, W]")
    limit = torch.finfo(working_dtype(inputs.dtype)).max ** 0.5  # norms square their input
    if not bool((inputs.abs() <= limit).all()):
        raise InputError(
            f"inputs hold NaN, infinite values or values above {limit:.2g}; check the image and its preprocessing"
        )


@contextlib.contextmanager
def isolate_pass(inputs: Tensor) -> Iterator[None]:
    """Enable gradients, disable compiled modules and an autocast of the caller inside; restore all of it afterwards."""
    with autocast_context(inputs, None), torch.inference_mode(mode=False), torch.enable_grad(), force_eager():
        yield
