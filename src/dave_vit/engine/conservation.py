"""Conservation: the score equals <W, x> plus what the additive constants contribute, image by image."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fingerprint import fingerprint_model
from dave_vit.engine.forward import compute_logits, count_passes
from dave_vit.engine.gradient import Constant, Gradient, gradient
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.engine.targets import Target, TargetLike, class_names


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

_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Axes]] = WeakKeyDictionary()
_LIKE = 0.05  # of the largest derivative; those of another image differ by as much as they are


def find_batch_axes(
    model: nn.Module, images: Tensor, target: Target, *, rules: RuleSet, autocast: torch.dtype | None
) -> Axes:
    """Return the batch dimension of each recorded constant.

    The first image is explained alone and after its mirror image. In a dimension that grows from 1 to 2 lie the images,
    if the constants of this one lie at its place in the pair; other dimensions, as of windows, or images that change
    their places, cannot be separated.
    """
    fingerprint = fingerprint_model(model)
    key = (rules.identity, images.shape[1:], images.dtype, images.device, autocast)
    known = _KNOWN.get(model, {})
    for state in (fingerprint.state, fingerprint.structure):
        if (state, *key) in known and target.score is None:
            return known[state, *key]
    pair = torch.cat([images[:1].flip(-1), images[:1]])
    axes = _compare_passes(model, pair, target.part(0, 1).repeat(2), rules, autocast)
    # Copies do not show whether they change their places, and a score may add constants of its own.
    if target.score is None and not torch.equal(pair[0], pair[1]):
        state = fingerprint_model(model).known_as(fingerprint)
        _KNOWN[model] = {**{old: entry for old, entry in known.items() if old[0] == state}, (state, *key): axes}
    return axes


def _compare_passes(
    model: nn.Module, images: Tensor, target: Target, rules: RuleSet, autocast: torch.dtype | None
) -> Axes:
    last = len(images) - 1
    target = target.split_classes()[0] if target.score is None else target  # one class is enough
    recorded = partial(gradient, model, rules=rules, autocast=autocast, record_constants=True)
    with count_passes():  # a check of the model, which is no pass of a map
        alone = recorded(images[last:], target.part(last, last + 1)).constants
        together = recorded(images, target).constants
    if len(alone) != len(together):
        return None
    return [_find_axis(*pair, batch=len(images)) for pair in zip(alone, together, strict=True)]


def _find_axis(alone: Constant, together: Constant, *, batch: int) -> int | None:
    """Return the only dimension that grows, from 1 to the size of the batch, if the last image is last in it."""
    one, all_ = alone.derivative[0], together.derivative[0]
    if one.ndim != all_.ndim:
        return None
    grown = [side for side in range(one.ndim) if one.shape[side] != all_.shape[side]]
    if len(grown) != 1 or (one.shape[grown[0]], all_.shape[grown[0]]) != (1, batch):
        return None
    there = all_.select(grown[0], batch - 1).unsqueeze(grown[0])
    return grown[0] if bool(((there - one).abs() <= _LIKE * one.abs().amax()).all()) else None
