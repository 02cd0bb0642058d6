"""The identity that must hold: the score is <W, x> plus what the additive constants contribute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dave_vit.intercept import RuleSet
from dave_vit.rules import EFFECTIVE
from dave_vit.run.gradient import gradient, logits_of
from dave_vit.targets import Target, TargetLike


def conservation_gap(
    model: nn.Module, inputs: Tensor, target: TargetLike = None, *, rules: RuleSet = EFFECTIVE
) -> float:
    """How far the logit is from <W, x> plus the sum over additive constants: zero for a fully covered model.

    Returns:
        The largest residual of the batch, relative to the larger of the logit and <W, x>. Rounding remains: about 1e-14
        in float64, 1e-5 in float32.
    """
    wanted = Target.of(target, len(inputs))
    wanted = wanted if wanted.known else wanted.resolve(logits_of(model, inputs))
    gaps = []
    for index, image in enumerate(inputs.split(1)):  # one by one: constants need not have a batch dimension
        parts = gradient(model, image, wanted.part(index, index + 1), rules=rules, record_constants=True)
        explained = _inner(parts.weight, image)
        total = explained + sum(_inner(constant.value, constant.derivative) for constant in parts.constants)
        score = float(parts.score)
        gaps.append(abs(score - total) / max(abs(score), abs(explained), torch.finfo(inputs.dtype).tiny))
    return max(gaps)


def _inner(left: Tensor, right: Tensor) -> float:
    return float((left.double() * right.double()).sum())
