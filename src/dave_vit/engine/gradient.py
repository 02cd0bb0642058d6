"""The effective transformation of a whole model: one forward and one backward pass with frozen operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.forward import check_inputs, forward, ready, undisturbed
from dave_vit.engine.interception import Interception
from dave_vit.engine.rule_sets.effective import EFFECTIVE
from dave_vit.engine.soundness import check_sound
from dave_vit.engine.targets import Target, TargetLike, names_of
from dave_vit.errors import UnsupportedOperator

T = TypeVar("T")


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
        target: class index or name, one an image, ``[B, K]`` of them (one forward pass, K backward passes), a
            ``Contrast``, a function of the model's output, as the model returns it, to one score an image, or None for
            the predicted class.
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
        run: what to call in the model's place, such as a lean form of it; the inputs are then known to be finite.
    """
    wanted = Target.of(target, len(inputs), names_of(model))
    parts = gradients(
        model, inputs, wanted, _itself, rules=rules, autocast=autocast, record_constants=record_constants, run=run
    )
    if not wanted.several:
        return parts[0]
    weight, score = (torch.stack([getattr(part, name) for part in parts], 1) for name in ("weight", "score"))
    return replace(parts[0], weight=weight, score=score)  # [B, K, C, H, W], [B, K]


def gradients(
    model: nn.Module,
    inputs: Tensor,
    target: TargetLike,
    reduce: Callable[[Gradient], T],
    *,
    rules: RuleSet,
    autocast: torch.dtype | None = None,
    record_constants: bool = False,
    run: Callable[[Tensor], Any] | None = None,
) -> list[T]:
    """What is made of each of several targets' gradients, one after the other, out of one forward pass.

    Args:
        model: any module that maps ``inputs`` to logits.
        inputs: preprocessed images.
        target: what is explained.
        reduce: is given the gradient of a target; the derivatives of all constants are large, so it should not keep it.
        rules: the derivatives in force.
        autocast: run the model under autocast with this type.
        record_constants: also find what was added on the way.
        run: what to call in the model's place, such as a lean form of it; the inputs are then known to be finite.
    """
    if run is None:
        check_inputs(inputs)
    wanted = Target.of(target, len(inputs), names_of(model))
    model = ready(model)
    mode = Interception(rules, model, record_constants=record_constants)
    with undisturbed(inputs):
        leaf, logits = forward(run or model, inputs, mode, autocast, wanted.read)
        seen = logits.detach() if wanted.places is None else None  # a place that views moved is another score
        check_sound(model, inputs, rules, autocast, logits=seen, score=wanted.score)
        rows, constants = wanted.rows(logits), mode.constants or []  # [K, B]
        leaves, made = [leaf, *(value for _, _, value in constants)], []
        for index, row in enumerate(rows):
            weight, *pulled = _derivative(row, leaves, keep=index < len(rows) - 1)
            pairs = zip(constants, pulled, strict=True)
            found = tuple(Constant(module, name, value.detach(), slope) for (module, name, value), slope in pairs)
            made.append(reduce(Gradient(weight, row.detach(), logits.detach(), found, mode.functions)))
    return made


def _itself(found: Gradient) -> Gradient:
    return found


def derivatives(rows: Tensor, leaves: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Of each row ``[B]`` of scores with respect to the leaves; zeros where it does not depend on one."""
    last = len(rows) - 1
    return [_derivative(row, leaves, keep=index < last) for index, row in enumerate(rows)]


def _derivative(row: Tensor, leaves: list[Tensor], *, keep: bool) -> tuple[Tensor, ...]:
    """Of one row; ``keep`` where the graph is needed again."""
    try:
        return torch.autograd.grad(row.sum(), leaves, retain_graph=keep, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise UnsupportedOperator(
            "the model writes in place into a tensor that a derivative needs again; use the function that returns a "
            "new tensor, such as x * y in place of x.mul_(y)"
        ) from error
