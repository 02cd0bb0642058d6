"""Symmetric relevance gain: removing what a map ranks lowest against removing what it ranks highest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit.errors import OptionError
from dave_vit.metrics.base import METRICS, Case, Metric, Scores, check_at_least
from dave_vit.metrics.perturbation import (
    Baseline,
    Model,
    Perturbation,
    Score,
    area,
    deletion,
    equal_steps,
)
from dave_vit.metrics.regions import region_deletion, square_regions

Regions = int | Literal["pixels"]


def relevance_gain(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Tensor,
    perturbation: Perturbation,
    regions: Tensor | None = None,
) -> Tensor:
    """Compute the score with the least important removed minus that with the most important removed: [B,steps].

    Equal entries are removed in the same order both times, so that a constant map gains nothing.

    Args:
        model: maps inputs to logits.
        inputs: preprocessed images [B,C,H,W].
        maps: [B,H,W], ranked with their sign.
        target: classes [B].
        perturbation: as for ``deletion``; both orders are used.
        regions: index of each pixel's region, [H,W], ranked by their mean; single pixels are removed by default.

    Returns:
        [B,steps]; NaN for a map with a value that is not finite.
    """
    least, most = (
        remove_in_order(model, inputs, maps, target, replace(perturbation, order=order), regions)
        for order in ("least", "most")
    )
    return least - most


def remove_in_order(
    model: Model, inputs: Tensor, maps: Tensor, target: Tensor, perturbation: Perturbation, regions: Tensor | None
) -> Tensor:
    """Compute the curve of the score while pixels, or regions if given, are removed in the order of the map."""
    if regions is None:
        return deletion(model, inputs, maps, target, perturbation)
    return region_deletion(model, inputs, maps, target, regions, perturbation)


class _OcclusionMetric(Metric):
    """Base of metrics that remove patches or pixels in steps, averaged over baselines.

    Args:
        baseline: value of what is removed: "zero", "black", "blur" or "mean"; the score is the mean over several.
        regions: squares along the shorter side of the image, ranked by their mean in the map, or "pixels".
        steps: equal steps from 0 to 100 %.
        score: "probability" or "accuracy" of the target.
        images: number of images of the data set to score.
        seed: seed of random orders.
    """

    axis = "share of the patches"

    def __init__(
        self,
        baseline: Baseline | Sequence[Baseline] = ("zero", "blur"),
        regions: Regions = 14,
        steps: int = 14,
        score: Score = "probability",
        images: int | None = None,
        seed: int = 0,
    ) -> None:
        check_at_least(3, steps=steps)
        check_at_least(1, images=images, regions=None if regions == "pixels" else regions)
        baselines: Sequence[Baseline] = [baseline] if isinstance(baseline, str) else baseline
        if not baselines:
            raise OptionError(f"no baseline; expected one or more of {', '.join(get_args(Baseline))}")
        self.images, self.regions, self.fractions = images or self.images, regions, equal_steps(steps)
        self.passes = self._count_passes(steps) * len(baselines)
        self._perturbations = [Perturbation(self.fractions, "least", one, score, (0.0,), seed) for one in baselines]

    def score(self, case: Case) -> Scores:
        """Return areas [B] with curves."""
        regions = None if self.regions == "pixels" else square_regions(case.size, self.regions, case.inputs.device)
        curves = [self._curve(case, replace(one, black=case.black), regions) for one in self._perturbations]
        curve = torch.stack(curves).mean(0)
        return Scores(area(curve, self.fractions), curve, self.fractions)

    @abstractmethod
    def _count_passes(self, steps: int) -> int:
        """Return the forward passes for each baseline."""

    @abstractmethod
    def _curve(self, case: Case, perturbation: Perturbation, regions: Tensor | None) -> Tensor:
        """Return the curve with one baseline, [B,steps]."""


@METRICS.register("srg")
class SymmetricRelevanceGain(_OcclusionMetric):
    """Symmetric relevance gain (Blücher et al., 2024): the area between least- and most-important-first removal."""

    summary = "Mean score while the least important patches are removed, minus that while the most important are."
    bounds = (-1.0, 1.0)

    def _count_passes(self, steps: int) -> int:
        return 2 * (steps - 1)  # both orders meet at the whole image and at the empty one, which need no pass

    def _curve(self, case: Case, perturbation: Perturbation, regions: Tensor | None) -> Tensor:
        inner = replace(perturbation, fractions=self.fractions[1:-1])
        return F.pad(relevance_gain(case.model, case.inputs, case.maps, case.target, inner, regions), (1, 1))


@METRICS.register("r_oms")
class ReferenceOMS(_OcclusionMetric):
    """R-OMS (Blücher et al., 2024): what random removal leaves of the score, so how reliable a baseline is.

    It is a property of the model and of the removal, the same for every map: `srg` of two baselines, models or sizes
    of patches can be compared only beside it.
    """

    summary = "Mean score while patches are removed in random order, whatever the map."
    bounds = (0.0, 1.0)
    images = 32

    def _count_passes(self, steps: int) -> int:
        return steps + 1

    def _curve(self, case: Case, perturbation: Perturbation, regions: Tensor | None) -> Tensor:
        equal = torch.zeros_like(case.maps)  # equal entries are removed in random order
        return remove_in_order(case.model, case.inputs, equal, case.target, perturbation, regions)
