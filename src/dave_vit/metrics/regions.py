"""What the model still sees when whole regions are taken away in the order of a map."""

from __future__ import annotations

import torch
from torch import Tensor

from dave_vit.errors import OptionError
from dave_vit.metrics.base import METRICS, Case, Metric, Scores
from dave_vit.metrics.perturbation import (
    Baseline,
    Model,
    Perturbation,
    Score,
    area,
    baseline_colours,
    check_batch,
    class_score,
    equal_steps,
    ranks,
)


@torch.no_grad()
def region_deletion(
    model: Model, inputs: Tensor, maps: Tensor, target: Tensor, regions: Tensor, how: Perturbation | None = None
) -> Tensor:
    """The curve of the score while regions are removed in the order of their mean in the map: [B,steps].

    Args:
        model: maps inputs to logits.
        inputs: preprocessed images [B,C,H,W].
        maps: [B,H,W], ranked with their sign.
        target: classes [B].
        regions: the number of each pixel's region, [H,W], from 0 on without gaps.
        how: as for ``deletion``; fractions are shares of the regions.

    Returns:
        [B,steps]; NaN for a map with a value that is not finite.
    """
    how = how or Perturbation(order="most", baseline="mean")
    check_batch(inputs, maps, target)
    rank = ranks(region_means(maps, regions).unsqueeze(1), how)[:, 0]  # [B,R]
    background = baseline_colours(inputs, how).expand_as(inputs)
    columns = []
    for fraction in how.fractions:
        gone = rank < round(fraction * rank.shape[1])  # [B,R]
        seen = torch.lerp(inputs, background, gone[:, regions][:, None].to(inputs.dtype))  # [B,C,H,W]
        columns.append(class_score(model(seen), target, how.score))
    finite = maps.isfinite().flatten(1).all(1)
    return torch.where(finite[:, None], torch.stack(columns, 1), torch.nan)


def region_means(maps: Tensor, regions: Tensor) -> Tensor:
    """The mean of maps [B,H,W] in each region [H,W]: [B,R]."""
    place = regions.flatten()
    sums = maps.new_zeros(len(maps), int(place.max()) + 1).index_add(1, place, maps.flatten(1))
    return sums / torch.bincount(place).to(maps.dtype)


def square_regions(size: tuple[int, int], across: int, device: torch.device | None = None) -> Tensor:
    """Squares, so many along the shorter side, numbered in reading order: [H,W]."""
    side = max(1, min(size) // across)
    row, column = (torch.arange(extent, device=device) // side for extent in size)
    return row[:, None] * (int(column[-1]) + 1) + column


@METRICS.register("irof")
class IROF(Metric):
    """Iterative removal of features (Rieger and Hansen, 2020): how fast the score falls while regions go.

    The regions are squares, where the paper has superpixels, so that no segmentation decides the score.

    Args:
        regions: squares along the shorter side of the image.
        steps: equal steps from 0 to 100 %.
        baseline: what a removed region becomes: "mean" of the image as published, "zero", "black" or "blur".
        score: "probability" or "accuracy".
        seed: of the lot among equal regions.
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
        if regions < 1:
            raise OptionError(f"{regions} regions along a side; expected 1 or more")
        self.regions = regions
        self._how = Perturbation(equal_steps(steps), "most", baseline, score, (0.0,), seed)

    def score(self, case: Case) -> Scores:
        """[B] with curves: the share of the score of the whole image that is left."""
        size = (case.inputs.shape[2], case.inputs.shape[3])
        regions = square_regions(size, self.regions, case.inputs.device)
        how = Perturbation(self._how.fractions, "most", self._how.baseline, self._how.score, case.black, self._how.seed)
        curve = region_deletion(case.model, case.inputs, case.maps, case.target, regions, how)
        left = curve / curve[:, :1].clamp(min=torch.finfo(curve.dtype).tiny)
        return Scores(1 - area(left, how.fractions), left, how.fractions)
