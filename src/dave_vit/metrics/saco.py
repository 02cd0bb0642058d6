"""SaCo: whether pixels with more salience matter more to the model, group against group."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.metrics.base import CONSTANT, METRICS, Case, Metric, Scores, check_at_least
from dave_vit.metrics.perturbation import (
    Baseline,
    Model,
    Perturbation,
    Score,
    check_batch,
    class_score,
    pixel_remover,
    ranks,
)


def saco(salience: Tensor, drops: Tensor) -> Tensor:
    """Return the coefficient of groups of pixels, from the most to the least salient: [B].

    Each pair of groups counts by its difference in salience, for the map if the group with more salience matters at
    least as much, and against it otherwise.

    Args:
        salience: sum of the map over each group, falling, [B,groups].
        drops: how far the score falls without each group, [B,groups].

    Returns:
        -1 to 1; NaN where all groups have the same salience.
    """
    weight = salience.unsqueeze(2) - salience.unsqueeze(1)  # [B,groups,groups]
    agrees = drops.unsqueeze(2) >= drops.unsqueeze(1)
    weight = weight.triu(1)
    return torch.where(agrees, weight, -weight).sum((1, 2)) / weight.abs().sum((1, 2))


@torch.no_grad()
def group_drops(
    model: Model, inputs: Tensor, maps: Tensor, target: Tensor, groups: int, perturbation: Perturbation
) -> tuple[Tensor, Tensor]:
    """Return the salience of groups of equally many pixels, falling, and the drops without each: [B,groups]."""
    check_batch(inputs, maps, target)
    remove, rank = pixel_remover(inputs, perturbation), ranks(maps, replace(perturbation, order="most"))
    group = rank * groups // rank[0].numel()  # [B,H,W]
    wide = maps.to(precise_dtype(maps.device))
    members = [group == number for number in range(groups)]
    salience = torch.stack([(wide * one).sum((1, 2)) for one in members], 1)
    scores = [class_score(model(images), target, perturbation.score) for images in (inputs, *map(remove, members))]
    return salience, torch.stack([scores[0] - score for score in scores[1:]], 1)


@METRICS.register("saco")
class SaCo(Metric):
    """Salience-guided faithfulness coefficient (Wu et al., 2024).

    Args:
        groups: groups of equally many pixels, in the order of the map.
        baseline: value of a removed pixel: "mean" of the image as published, "zero", "black" or "blur".
        score: "probability" or "accuracy" of the target.
        seed: seed of the random order of equal pixels.
    """

    summary = "Agreement of pairs of pixel groups in salience and in the fall of the score, weighted by salience."
    bounds = (-1.0, 1.0)
    unscored = CONSTANT

    def __init__(
        self, groups: int = 10, baseline: Baseline = "mean", score: Score = "probability", seed: int = 0
    ) -> None:
        check_at_least(2, groups=groups)
        self.groups, self.passes = groups, 1 + groups
        self._perturbation = Perturbation(baseline=baseline, score=score, black=(0.0,), seed=seed)

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        perturbation = replace(self._perturbation, black=case.black)
        return Scores(saco(*group_drops(case.model, case.inputs, case.maps, case.target, self.groups, perturbation)))
