"""The effective transformation of a whole model: one forward and one backward pass with frozen operators.

It is exact where the score equals <W, x> plus what the additive constants contribute, image by image.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fast import PassKind, substitute_rules
from dave_vit.engine.fast.recording import Recording
from dave_vit.engine.fingerprint import fingerprint_model
from dave_vit.engine.forward import check_inputs, compute_logits, count_passes, forward, isolate_pass, prepare_model
from dave_vit.engine.interception import Interception, RecordedConstant
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.engine.soundness import check_soundness
from dave_vit.engine.targets import Target, TargetLike, class_names
from dave_vit.errors import UnsupportedOperator


def effective_transformation(
    model: nn.Module,
    inputs: Tensor,
    target: TargetLike = None,
    *,
    rules: RuleSet = EFFECTIVE,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """Compute the image-shaped weight W of the explained logit, with all operators frozen (eq. (4)).

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
    normalised = Target.of(target, len(inputs), class_names(model))
    weight = gradient(model, inputs, normalised, rules=rules, autocast=autocast).weight
    return weight if normalised.has_class_axis else weight.squeeze(1)


@dataclass(frozen=True)
class Constant:
    """An additive constant that met the input on its way.

    Attributes:
        module: path of the module that added it.
        function: name of the function that added it.
        value: what was added.
        derivative: of each of the K scores with respect to it, ``[K, *value.shape]``, or what is kept of it.
    """

    module: str
    function: str
    value: Tensor
    derivative: Tensor


@dataclass(frozen=True)
class Gradient:
    """Scores and their derivatives under a rule set: one forward pass, K backward passes.

    Attributes:
        weight: derivative of each score with respect to the inputs, ``[B, K, C, H, W]``.
        score: the explained scores, ``[B, K]``.
        logits: what the scores are computed from: ``[B, classes]``, or the values of a score function ``[B, 1]``.
        constants: what was added on the way; empty unless recorded.
        functions: how often each function was called with a tensor that depends on the input.
    """

    weight: Tensor
    score: Tensor
    logits: Tensor
    constants: tuple[Constant, ...] = ()
    functions: dict[str, int] = field(default_factory=dict)


Combine = Callable[[Tensor, Sequence[Constant]], Tensor]
"""From the weight of one class ``[B, C, H, W]`` and the constants, with K = 1, to attributions ``[B, C, H, W]``."""

Shorten = Callable[[RecordedConstant, Tensor], Tensor]
"""From a constant and its derivative to what is kept of the derivative."""


def gradient(
    model: nn.Module,
    inputs: Tensor,
    target: TargetLike = None,
    *,
    rules: RuleSet,
    autocast: torch.dtype | None = None,
    record_constants: bool = False,
    combine: Combine | None = None,
    shorten: Shorten | None = None,
    run: Callable[[Tensor], Any] | None = None,
    resolve: Callable[[Tensor], Target] | None = None,
    kind: PassKind | None = None,
) -> Gradient:
    """Compute scores and their derivatives under a rule set; parameters get no gradients, the model is not changed.

    Args:
        model: any module that maps ``inputs`` to logits.
        inputs: preprocessed images ``[B, C, H, W]``.
        target: what is explained.
        rules: the derivatives in force.
        autocast: run the model under autocast with this type.
        record_constants: also record what was added on the way.
        combine: record constants and replace the weight of each class by this function of both. The constants are then
            dropped: their derivatives are large, and those of K classes at once may not fit into memory.
        shorten: what is kept of the derivative of each constant, computed when the backward pass is there: all of them
            together take more memory than the pass.
        run: what to call instead of the model, such as a recording of it; the inputs are then known to be finite.
        resolve: returns the target from the logits, where it depends on them in another way than a target says itself.
        kind: of the pass; by default that of a recording if ``run`` is one.
    """
    if run is None:
        check_inputs(inputs)
    target = Target.of(target, len(inputs), class_names(model))
    model = prepare_model(model)
    kind = kind or (PassKind.RECORDED if isinstance(run, Recording) else PassKind.EAGER)
    constants_needed = record_constants or combine is not None
    mode = Interception(substitute_rules(rules, kind), model, record_constants=constants_needed)
    with isolate_pass(inputs):
        leaf, logits = forward(run or model, inputs, mode, autocast, target.read)
        recorded = mode.take_constants()
        checked = logits.detach() if target.places is None else None  # a place that views moved is another score
        is_random = bool(mode.draws.generators)
        check_soundness(model, inputs, rules, autocast, logits=checked, score=target.score, is_random=is_random)
        scores = (target if resolve is None else resolve(logits.detach())).scores(logits)
        weight, constants = _differentiate(scores, leaf, recorded, combine, shorten)
    return Gradient(weight, scores.detach(), logits.detach(), constants, mode.functions)


def _differentiate(
    scores: Tensor, leaf: Tensor, recorded: list[RecordedConstant], combine: Combine | None, shorten: Shorten | None
) -> tuple[Tensor, tuple[Constant, ...]]:
    """Differentiate scores ``[B, K]`` with respect to the inputs, ``[B, K, C, H, W]``, and to the constants."""
    if shorten is None:
        parts = derivatives(scores, [leaf, *(constant.place for constant in recorded)])
    else:
        parts = _shortened_derivatives(scores, leaf, recorded, shorten)
    if combine is not None:  # one class at a time, so that the derivatives of its constants are freed before the next
        return _stack([combine(weight, _constants(recorded, [slopes])) for weight, *slopes in parts], 1), ()
    columns = list(parts)
    return _stack([column[0] for column in columns], 1), _constants(recorded, [column[1:] for column in columns])


def _shortened_derivatives(
    scores: Tensor, leaf: Tensor, recorded: list[RecordedConstant], shorten: Shorten
) -> Iterator[tuple[Tensor, ...]]:
    """Yield, for each score, the derivative of the inputs and what is kept of those of the constants."""
    kept: dict[int, Tensor] = {}

    def watch(index: int, constant: RecordedConstant) -> Any:
        def keep(slopes: tuple[Tensor | None, ...]) -> None:
            slope = slopes[constant.place.output_nr]
            if slope is not None:
                kept[index] = shorten(constant, slope)

        return constant.place.node.register_prehook(keep)

    handles = [watch(index, constant) for index, constant in enumerate(recorded)]
    try:
        for (weight,) in derivatives(scores, [leaf]):
            kept |= {i: shorten(one, torch.zeros_like(one.value)) for i, one in enumerate(recorded) if i not in kept}
            yield weight, *(kept.pop(index) for index in range(len(recorded)))
    finally:
        for handle in handles:
            handle.remove()


def _constants(recorded: list[RecordedConstant], slopes: Sequence[Sequence[Tensor | None]]) -> tuple[Constant, ...]:
    """Join recorded values with their derivatives, one sequence for each of the K scores; None is zero."""

    def slope_of(value: Tensor, each: Sequence[Tensor | None]) -> Tensor:
        return _stack([torch.zeros_like(value) if slope is None else slope for slope in each], 0)

    pairs = zip(recorded, zip(*slopes, strict=True), strict=True)
    return tuple(Constant(one.module, one.function, one.value, slope_of(one.value, each)) for one, each in pairs)


def _stack(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Stack tensors, without a copy where there is one."""
    return tensors[0].unsqueeze(axis) if len(tensors) == 1 else torch.stack(list(tensors), axis)


def derivatives(scores: Tensor, leaves: Sequence[Any], *, retain_graph: bool = False) -> Iterator[tuple[Any, ...]]:
    """Differentiate scores ``[B, K]`` with respect to the leaves: K tuples of tensors.

    Where scores do not depend on a leaf, they are zeros; None for a place in the graph.

    Args:
        scores: with their graph.
        leaves: tensors of the graph, or places in it (``GradientEdge``).
        retain_graph: keep the graph after the last of them.
    """
    last = scores.shape[1] - 1
    for index, column in enumerate(scores.unbind(1)):
        keep = retain_graph or index < last
        try:
            found = torch.autograd.grad(column.sum(), leaves, None, keep, allow_unused=True)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise UnsupportedOperator(
                "the model writes in place into a tensor that a derivative needs again; use the function that returns "
                "a new tensor, such as x * y instead of x.mul_(y)"
            ) from error
        pairs = zip(found, leaves, strict=True)
        yield tuple(torch.zeros_like(leaf) if one is None and isinstance(leaf, Tensor) else one for one, leaf in pairs)


@dataclass(frozen=True)
class Balance:
    """A score and the parts that must add up to it.

    Attributes:
        score: of one image.
        explained: <W, x>, what the image contributes.
        constants: what additive constants contribute, by the path of their module.
    """

    score: float
    explained: float
    constants: Mapping[str, float]

    @classmethod
    def of(cls, parts: Gradient, image: Tensor, index: int = 0) -> Balance:
        """Compute the parts for one image ``[1, C, H, W]`` and one of its K scores, from a gradient with constants."""
        constants: dict[str, float] = defaultdict(float)
        for constant in parts.constants:
            constants[constant.module] += _inner(constant.value, constant.derivative[index])
        return cls(float(parts.score[0, index]), _inner(parts.weight[:, index], image), constants)

    @property
    def residual(self) -> float:
        """What no part accounts for."""
        return abs(self.score - self.explained - sum(self.constants.values()))

    @property
    def gap(self) -> float:
        """The residual, relative to the larger of the score and <W, x>."""
        return self.residual / max(abs(self.score), abs(self.explained), sys.float_info.min)


def compute_balances(
    model: nn.Module, inputs: Tensor, target: TargetLike = None, *, rules: RuleSet = EFFECTIVE
) -> Iterator[Balance]:
    """Yield one balance per image and class; images one by one, since constants need not have a batch dimension."""
    normalised = Target.of(target, len(inputs), class_names(model))
    resolved = normalised if normalised.is_resolved else normalised.resolve(compute_logits(model, inputs))
    for index, image in enumerate(inputs.split(1)):
        parts = gradient(model, image, resolved.part(index, index + 1), rules=rules, record_constants=True)
        yield from (Balance.of(parts, image, column) for column in range(resolved.count))


def conservation_gap(
    model: nn.Module, inputs: Tensor, target: TargetLike = None, *, rules: RuleSet = EFFECTIVE
) -> float:
    """Compute how far the logit is from <W, x> plus the sum over additive constants: zero for a fully covered model.

    Returns:
        The largest residual of the batch, relative to the larger of the logit and <W, x>. Rounding remains: about 1e-14
        in float64, 1e-5 in float32.
    """
    gaps = [balance.gap for balance in compute_balances(model, inputs, target, rules=rules)]
    return float(torch.tensor(gaps, dtype=torch.float64).max())  # NaN where one of them is


def _inner(left: Tensor, right: Tensor) -> float:
    left, right = (torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in (left, right))
    wide = precise_dtype(left.device)
    return float((left.to(wide) * right.to(wide)).sum())


Axes = list[int | None] | None
"""Batch dimension of each constant, None for one whose images cannot be separated; None as a whole if none can."""

_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, tuple[int, Axes]]] = WeakKeyDictionary()
_LIKE = 0.05  # of the largest derivative; those of another image differ by as much as they are


def find_batch_axes(
    model: nn.Module, images: Tensor, target: Target, *, rules: RuleSet, autocast: torch.dtype | None
) -> Axes:
    """Return the batch dimension of each recorded constant.

    The first image is explained alone and after its mirror image. In a dimension that grows from 1 to 2 lie the images,
    if the constants of this one lie at its place in the pair; other dimensions, as of windows, or images that change
    their places, cannot be separated.
    """
    fingerprint, known = fingerprint_model(model), _KNOWN.setdefault(model, {})
    # A score may add constants of its own, and copies do not show whether they change their places.
    computation = () if target.score is None else getattr(target.score, "computation", None)
    key = (computation, rules.identity, images.shape[1:], images.dtype, images.device, autocast)
    if key in known and fingerprint.is_known_as(known[key][0]):
        return known[key][1]
    pair, both = torch.cat([images[:1].flip(-1), images[:1]]), target.part(0, 1).repeat(2)
    both, first = (both.split_classes()[0], None) if target.score is None else (both, _first_score)
    recorded = partial(gradient, model, rules=rules, autocast=autocast, record_constants=True, shorten=_project)
    recorded = partial(recorded, resolve=first)
    with count_passes():  # a check of the model, which is no pass of a map
        alone, together = recorded(pair[1:], both.part(1, 2)).constants, recorded(pair, both).constants
    axes: Axes = None
    if len(alone) == len(together):
        axes = [_find_axis(one.derivative, two.derivative) for one, two in zip(alone, together, strict=True)]
    if computation is not None and not torch.equal(pair[0], pair[1]):
        known[key] = (fingerprint_model(model).known_as(fingerprint), axes)
    return axes


_WAVES = 8  # sums of a derivative's channels, by which images are told from each other


def _project(constant: RecordedConstant, slope: Tensor) -> Tensor:
    """Return a few sums over the last of three dimensions, where no images are; other derivatives as they are."""
    if constant.value.ndim != 3:
        return slope
    phases = torch.arange(_WAVES * slope.shape[-1], device=slope.device, dtype=torch.float32)
    return slope @ phases.view(-1, _WAVES).cos().to(slope.dtype)


def _first_score(scores: Tensor) -> Target:
    """Return the target of the first of K scores ``[B, K]``: its derivatives tell as much as those of all."""
    return Target.of(0, len(scores))


def _find_axis(alone: Tensor, pair: Tensor) -> int | None:
    """Return the only dimension in which derivatives ``[1, ...]`` grow, from 1 to 2, if the image is the last in it."""
    one, two = alone[0], pair[0]
    grown = [side for side, sizes in enumerate(zip(one.shape, two.shape, strict=False)) if sizes[0] != sizes[1]]
    if one.ndim != two.ndim or len(grown) != 1 or (one.shape[grown[0]], two.shape[grown[0]]) != (1, 2):
        return None
    there = two.narrow(grown[0], 1, 1)
    return grown[0] if bool(((there - one).abs() <= _LIKE * one.abs().amax()).all()) else None
