"""Conservation: the score equals <W, x> plus what the additive constants contribute."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.forward import compute_logits
from dave_vit.engine.gradient import Gradient, gradient
from dave_vit.engine.rule_sets.effective import EFFECTIVE
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
