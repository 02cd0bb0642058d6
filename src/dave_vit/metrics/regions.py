"""Region deletion: the model's score while whole regions are removed in the order of a map."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dave_vit.metrics.base import METRICS, Case, Metric, Scores, check_at_least
from dave_vit.metrics.perturbation import (
    Baseline,
    Model,
    Perturbation,
    Score,
    area,
    check_batch,
    equal_steps,
    pixel_remover,
    removal_curve,
)


@torch.no_grad()
def region_deletion(
    model: Model, inputs: Tensor, maps: Tensor, target: Tensor, regions: Tensor, perturbation: Perturbation
) -> Tensor:
    """Compute the curve of the score while regions are removed in the order of their mean in the map: [B,steps].

    Args:
        model: maps inputs to logits.
        inputs: preprocessed images [B,C,H,W].
        maps: [B,H,W], ranked with their sign.
        target: classes [B].
        regions: index of each pixel's region, [H,W], from 0 on without gaps.
        perturbation: as for ``deletion``; fractions are fractions of the regions.

    Returns:
        [B,steps]; NaN for a map with a value that is not finite.
    """
    check_batch(inputs, maps, target)
    remove = pixel_remover(inputs, perturbation)
    means = region_means(maps, regions)  # [B,R]
    return removal_curve(model, target, means, perturbation, lambda removed, step: remove(removed[:, regions]))


def region_means(maps: Tensor, regions: Tensor) -> Tensor:
    """Return the mean of maps [B,H,W] in each region [H,W]: [B,R]."""
    index = regions.flatten()
    sums = maps.new_zeros(len(maps), int(index.max()) + 1).index_add(1, index, maps.flatten(1))
    return sums / torch.bincount(index).to(maps.dtype)


def square_regions(size: tuple[int, int], across: int, device: torch.device | None = None) -> Tensor:
    """Return indices of squares, ``across`` along the shorter side, in reading order: [H,W]."""
    side = max(1, min(size) // across)
    row, column = (torch.arange(extent, device=device) // side for extent in size)
    return row[:, None] * (int(column[-1]) + 1) + column


@METRICS.register("irof")
class IROF(Metric):
    """Iterative removal of features (Rieger and Hansen, 2020): how fast the score falls while regions are removed.

    The regions are squares instead of the paper's superpixels, so that no segmentation decides the score.

    Args:
        regions: squares along the shorter side of the image.
        steps: equal steps from 0 to 100 %.
        baseline: value of a removed region: "mean" of the image as published, "zero", "black" or "blur".
        score: "probability" or "accuracy".
        seed: seed of the random order of equal regions.
    """

    summary = "Share of the target's score that is lost while regions are removed, the most important first."
    axis = "share of the regions"

    def __init__(
        self,
        regions: int = 14,
        steps: int = 20,
        baseline: Baseline = "mean",
        score: Score = "probability",
        seed: int = 0,
    ) -> None:
        check_at_least(1, regions=regions)
        self.regions = regions
        self._perturbation = Perturbation(equal_steps(steps), "most", baseline, score, (0.0,), seed)

    def score(self, case: Case) -> Scores:
        """Return [B] with curves: the remaining fraction of the whole image's score."""
        regions = square_regions(case.size, self.regions, case.inputs.device)
        perturbation = replace(self._perturbation, black=case.black)
        curve = region_deletion(case.model, case.inputs, case.maps, case.target, regions, perturbation)
        remaining = curve / curve[:, :1].clamp(min=torch.finfo(curve.dtype).tiny)
        return Scores(1 - area(remaining, perturbation.fractions), remaining, perturbation.fractions)
