"""The effective transformation of a whole model: one forward and one backward pass with frozen operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.errors import InputError, OutputError, UnsupportedOperator, training_error
from dave_vit.intercept.calls import RuleSet
from dave_vit.intercept.mode import Interception, autograd_enabled, check_graph, checkpointing_error
from dave_vit.rules.sets.effective import EFFECTIVE
from dave_vit.targets import Target, TargetLike, class_logits

Read = Callable[[Any, int], Tensor]
"""``read(output, batch)``: what is looked at in a model's output, ``[B, classes]``; see ``Target.read``."""


def effective_transformation(
    model: nn.Module,
    inputs: Tensor,
    target: TargetLike = None,
    *,
    rules: RuleSet = EFFECTIVE,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """The image-shaped weight W of the explained logit, with all operators frozen (eq. (4)).

    Args:
        model: any module; it is left exactly as it was. Classes need logits ``[B, classes]``, other targets do not.
        inputs: preprocessed images ``[B, C, H, W]``.
        target: class index, one index an image, ``[B, K]`` indices (one forward pass, K backward passes), a function
            of the model's output, as the model returns it, to one score an image, or None for the predicted class.
        rules: the derivatives in force; the default is the effective transformation.
        autocast: run the model under autocast with this type.

    Returns:
        W in the shape of the inputs; ``[B, K, C, H, W]`` for ``[B, K]`` targets.

    Example:
        >>> weight = effective_transformation(model, images, target=207)
        >>> attribution = weight * images
    """
    return gradient(model, inputs, target, rules=rules, autocast=autocast).weight


@dataclass(frozen=True)
class Constant:
    """An additive constant that met the input on its way.

    Attributes:
        module: path of the module that added it.
        function: name of the function that added it.
        value: what was added.
        derivative: of the score with respect to it.
    """

    module: str
    function: str
    value: Tensor
    derivative: Tensor


@dataclass(frozen=True)
class Gradient:
    """One backward pass under a rule set.

    Attributes:
        weight: derivative of the score with respect to the inputs.
        score: the explained score, ``[B]`` or ``[B, K]``.
        logits: what was looked at: ``[B, classes]``, or of a score function its values ``[B, 1]``.
        constants: what was added on the way; empty unless asked for.
        functions: how often each function met a tensor that carries the input.
    """

    weight: Tensor
    score: Tensor
    logits: Tensor
    constants: tuple[Constant, ...] = ()
    functions: dict[str, int] = field(default_factory=dict)


def gradient(
    model: nn.Module,
    inputs: Tensor,
    target: TargetLike = None,
    *,
    rules: RuleSet,
    autocast: torch.dtype | None = None,
    record_constants: bool = False,
    run: Callable[[Tensor], Any] | None = None,
) -> Gradient:
    """Score and derivative under a rule set; parameters never get gradients and nothing stays on the model.

    Args:
        model: any module that maps ``inputs`` to logits.
        inputs: preprocessed images.
        target: what is explained.
        rules: the derivatives in force.
        autocast: run the model under autocast with this type.
        record_constants: also find what was added on the way.
        run: what to call in the model's place, such as a lean form of it.
    """
    check_inputs(inputs)
    wanted = Target.of(target, len(inputs))
    model = ready(model)
    mode = Interception(rules, model, record_constants=record_constants)
    with undisturbed(inputs):
        leaf, logits = forward(run or model, inputs, mode, autocast, wanted.read)
        rows = wanted.rows(logits)  # [K, B]
        pulled = derivatives(rows, [leaf, *(constant for _, _, constant in mode.constants or ())])
    weight = torch.stack([grads[0] for grads in pulled], 1)  # [B, K, C, H, W]
    constants = tuple(
        Constant(module, function, value.detach(), derivative)
        for (module, function, value), derivative in zip(mode.constants or (), pulled[0][1:], strict=True)
    )
    score = rows.detach().T
    if not wanted.several:
        weight, score = weight[:, 0], score[:, 0]
    return Gradient(weight, score, logits.detach(), constants, mode.functions)


def derivatives(rows: Tensor, leaves: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Of each row ``[B]`` of scores with respect to the leaves; zeros where it does not depend on one."""
    last = len(rows) - 1
    return [
        torch.autograd.grad(row.sum(), leaves, retain_graph=index < last, allow_unused=True, materialize_grads=True)
        for index, row in enumerate(rows)
    ]


def ready(model: nn.Module) -> nn.Module:
    """The model to run, once it is known to act the same every time."""
    model = getattr(model, "_orig_mod", model)  # torch.compile hides the functions from the interception
    check_model(model)
    return model


def forward(
    model: Callable[[Tensor], Any],
    inputs: Tensor,
    mode: Interception,
    autocast: torch.dtype | None,
    read: Read = class_logits,
) -> tuple[Tensor, Tensor]:
    """The inputs as a leaf of the graph, and the logits under the interception.

    The logits are checked to depend on the inputs and to hold no foreign derivative. What reads them out of the model's
    output is intercepted as well: a score that divides by a norm holds it, as a layer of the model would.
    """
    leaf = (inputs.clone() if inputs.is_inference() else inputs.detach()).requires_grad_()
    entered = leaf.clone()  # no leaf, so that it is not taken for a parameter; the model may write into it
    with torch.autocast(inputs.device.type, dtype=autocast, enabled=autocast is not None), mode:
        logits = read(model(entered), len(inputs))
    if not logits.requires_grad:
        raise _lost(mode)
    if mode.rules.strict:
        check_graph(logits)
    return leaf, logits


def logits_of(model: nn.Module, inputs: Tensor, read: Read = class_logits) -> Tensor:
    """The model's logits, or what else is read of its output, without gradients and without touching anything else."""
    check_model(model)
    with undisturbed(inputs), torch.no_grad():
        return read(model(inputs), len(inputs))


def _lost(mode: Interception) -> Exception:
    if mode.losses:
        last = " and ".join(mode.losses[-2:])  # the function that froze it, and the sum that took the rest along
        return UnsupportedOperator(
            f"no linear path leads from the input to the logits; it was lost at or before {last}: return logits rather "
            "than probabilities, and use a supported function there"
        )
    return OutputError("the logits do not depend on the input; is the model run under no_grad or from a cache?")


def check_inputs(inputs: Tensor) -> None:
    """Refuse what cannot be differentiated or would give a map of NaN."""
    if not isinstance(inputs, Tensor):
        raise InputError(f"inputs are of type {type(inputs).__name__}; give a float tensor [B, C, H, W]")
    if not inputs.is_floating_point():
        raise InputError(f"inputs have type {inputs.dtype}; give a float tensor, as model.preprocess returns it")
    if inputs.ndim < 2 or inputs.numel() == 0:
        raise InputError(f"inputs have shape {tuple(inputs.shape)}; give a batch of images [B, C, H, W]")
    if not bool(torch.isfinite(inputs).all()):
        raise InputError("inputs hold NaN or infinite values; check the image and its preprocessing")


def check_model(model: nn.Module) -> None:
    """Refuse a model that acts at random, learns while it runs, or recomputes its forward pass."""
    for name, module in model.named_modules():
        if getattr(module, "grad_checkpointing", False) is True:
            raise checkpointing_error()
        if not module.training:
            continue
        if getattr(module, "gradient_checkpointing", False) is True:
            raise checkpointing_error()
        rate = getattr(module, "p", 0.0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
        rate = max(rate or 0.0, getattr(module, "drop_prob", 0.0) or 0.0)
        if rate > 0.0 or isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise training_error(f"{type(module).__name__} {name!r}")


@contextlib.contextmanager
def undisturbed(inputs: Tensor) -> Iterator[None]:
    """Gradients on inside; grad mode and random state as before afterwards."""
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices), autograd_enabled():
        yield
