"""Removal of regions and imputed pixels: IROF, symmetric relevance gain, R-OMS, ROAD."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit._internal.schema import Bounds, Count, NonNegative
from dave_vit.errors import OptionError
from dave_vit.metrics.base import METRICS, Case, Metric, Scores
from dave_vit.metrics.perturbation import (
    Baseline,
    Model,
    Perturbation,
    Score,
    area,
    check_batch,
    deletion,
    equal_steps,
    removal_curve,
)
from dave_vit.neighborhood.draws import sample_generator


def square_regions(size: tuple[int, int], across: int, device: torch.device | None = None) -> Tensor:
    """Return indices of squares, ``across`` along the shorter side, in reading order: [H,W]."""
    side = max(1, min(size) // across)
    row, column = (torch.arange(extent, device=device) // side for extent in size)
    return row[:, None] * (int(column[-1]) + 1) + column


class _RemovalMetric(Metric):
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
        regions: Count | Literal["pixels"] = 14,
        steps: Annotated[int, Bounds(at_least=3)] = 14,
        score: Score = "probability",
        images: Count | None = None,
        seed: int = 0,
    ) -> None:
        baselines: Sequence[Baseline] = [baseline] if isinstance(baseline, str) else baseline
        if not baselines:
            raise OptionError(f"no baseline; expected one or more of {', '.join(get_args(Baseline))}")
        self.images, self.regions, self.fractions = images or self.images, regions, equal_steps(steps)
        self._perturbations = [Perturbation(self.fractions, "least", one, score, (0.0,), seed) for one in baselines]

    def score(self, case: Case) -> Scores:
        """Return areas [B] with curves."""
        regions = None if self.regions == "pixels" else square_regions(case.size, self.regions, case.inputs.device)
        curves = [self._curve(case, replace(one, black=case.black), regions) for one in self._perturbations]
        curve = torch.stack(curves).mean(0)
        return Scores(area(curve, self.fractions), curve, self.fractions)

    @abstractmethod
    def _curve(self, case: Case, perturbation: Perturbation, regions: Tensor | None) -> Tensor:
        """Return the curve with one baseline, [B,steps]."""


@METRICS.register("irof")
class IROF(_RemovalMetric):
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
        regions: Count = 14,
        steps: Count = 20,
        baseline: Baseline = "mean",
        score: Score = "probability",
        seed: int = 0,
    ) -> None:
        super().__init__(baseline, regions, steps, score, seed=seed)

    def score(self, case: Case) -> Scores:
        """Return [B] with curves: the remaining fraction of the whole image's score."""
        remaining = super().score(case)
        return replace(remaining, values=1 - remaining.values)

    def _curve(self, case: Case, perturbation: Perturbation, regions: Tensor | None) -> Tensor:
        most_first = replace(perturbation, order="most")
        curve = deletion(case.model, case.inputs, case.maps, case.target, most_first, regions)
        return curve / curve[:, :1].clamp(min=torch.finfo(curve.dtype).tiny)


@METRICS.register("srg")
class SymmetricRelevanceGain(_RemovalMetric):
    """Symmetric relevance gain (Blücher et al., 2024): the area between least- and most-important-first removal.

    Equal entries are removed in the same order both times, so that a constant map gains nothing.
    """

    summary = "Mean score while the least important patches are removed, minus that while the most important are."
    bounds = (-1.0, 1.0)

    def _curve(self, case: Case, perturbation: Perturbation, regions: Tensor | None) -> Tensor:
        # Both orders meet at the whole image and at the empty one, which need no pass.
        inner = replace(perturbation, fractions=self.fractions[1:-1])
        orders = (inner, replace(inner, order="most"))
        least, most = (deletion(case.model, case.inputs, case.maps, case.target, one, regions) for one in orders)
        return F.pad(least - most, (1, 1))


@METRICS.register("r_oms")
class ReferenceOMS(_RemovalMetric):
    """R-OMS (Blücher et al., 2024): what random removal leaves of the score, so how reliable a baseline is.

    It is a property of the model and of the removal, the same for every map: `srg` of two baselines, models or sizes
    of patches can be compared only beside it.
    """

    summary = "Mean score while patches are removed in random order, whatever the map."
    bounds = (0.0, 1.0)
    images = 32

    def _curve(self, case: Case, perturbation: Perturbation, regions: Tensor | None) -> Tensor:
        equal = torch.zeros_like(case.maps)  # equal entries are removed in random order
        return deletion(case.model, case.inputs, equal, case.target, perturbation, regions)


FRACTIONS = tuple(tenth / 10 for tenth in range(1, 10))

_TOLERANCE = 1e-4  # residual of the equations relative to their right side
_MAX_ITERATIONS = 2000  # a hole as large as a photograph needs a few hundred
_COARSEST = 8  # side in pixels; larger images start from the solution at half the size


def impute(images: Tensor, removed: Tensor) -> Tensor:
    """Fill the removed pixels [B,H,W] of images [B,C,H,W] with the weighted mean of their eight neighbours.

    Direct neighbours weigh 1/6 and diagonal ones 1/12. These are linear equations, one for each removed pixel, solved
    by conjugate gradients for all channels of all images at once. An image without any pixel left becomes zero.
    """
    wide = images.to(working_dtype(images.dtype))
    hole = removed[:, None].to(wide.dtype).expand_as(wide)
    return _fill_holes(wide * (1 - hole), hole).to(images.dtype)


def _fill_holes(known: Tensor, hole: Tensor) -> Tensor:
    """Fill holes (1 inside) of images that are zero there; the solution at half the size is the starting point."""
    weights = _sum_neighbours(torch.ones_like(hole))  # less than one at the border of the image

    def equations(values: Tensor) -> Tensor:
        return hole * (weights * values - _sum_neighbours(values))

    start = torch.zeros_like(known)
    if min(hole.shape[2:]) > _COARSEST:
        share = F.avg_pool2d(1 - hole, 2, ceil_mode=True, count_include_pad=False)
        coarse = F.avg_pool2d(known, 2, ceil_mode=True, count_include_pad=False) / torch.where(share > 0, share, 1)
        half = _fill_holes(coarse, (share == 0).to(known.dtype))
        start = hole * F.interpolate(half, scale_factor=2, mode="bilinear")[..., : hole.shape[2], : hole.shape[3]]
    return known + _solve_conjugate_gradient(equations, hole * _sum_neighbours(known), start)


def _sum_neighbours(images: Tensor) -> Tensor:
    """Return weighted sums of the eight neighbours with zeros outside: [B,C,H,W]."""
    rows = 2 * images
    rows[:, :, 1:] += images[:, :, :-1]
    rows[:, :, :-1] += images[:, :, 1:]
    sums = 2 * rows - 4 * images  # 1 2 1 down, then across, without the pixel itself
    sums[..., 1:] += rows[..., :-1]
    sums[..., :-1] += rows[..., 1:]
    return sums / 12


def _solve_conjugate_gradient(equations: Callable[[Tensor], Tensor], right: Tensor, start: Tensor) -> Tensor:
    """Solve linear equations by conjugate gradients, each channel [B,C] separately."""
    limit = _TOLERANCE**2 * right.square().sum((2, 3), keepdim=True)
    solution, residual = start, right - equations(start)
    direction, size = residual, residual.square().sum((2, 3), keepdim=True)
    for _ in range(_MAX_ITERATIONS):
        if bool((size <= limit).all()):
            break
        image = equations(direction)
        step = torch.where(size > limit, size / (direction * image).sum((2, 3), keepdim=True), 0)
        solution, residual = solution + step * direction, residual - step * image
        before, size = size, residual.square().sum((2, 3), keepdim=True)
        direction = residual + torch.where(before > 0, size / before, 0) * direction
    return solution


@torch.no_grad()
def road(
    model: Model, inputs: Tensor, maps: Tensor, target: Tensor, perturbation: Perturbation, *, noise: float = 0.01
) -> Tensor:
    """Compute the curve of the score while pixels are imputed in the order of the map: [B,steps].

    Args:
        model: maps inputs to logits.
        inputs: preprocessed images [B,C,H,W].
        maps: [B,H,W], ranked with their sign.
        target: classes [B].
        perturbation: fractions, order and score; the seed is that of the noise, too. It has no baseline here.
        noise: standard deviation of the noise added to imputed pixels, the same noise for every image.

    Returns:
        [B,steps]; NaN for a map with a value that is not finite.
    """
    check_batch(inputs, maps, target)

    def remove(removed: Tensor, step: int) -> Tensor:
        generator = sample_generator(perturbation.seed, step, "noise")
        drawn = torch.randn(inputs.shape[1:], generator=generator, device="cpu")
        return impute(inputs, removed) + noise * drawn.to(inputs) * removed[:, None]

    return removal_curve(model, target, maps, perturbation, remove)


@METRICS.register("road")
class ROAD(Metric):
    """Remove and debias (Rong et al., 2022): the least against the most important pixels, both imputed.

    Args:
        score: "probability" or "accuracy" of the target.
        noise: standard deviation of the noise added to imputed pixels.
        images: number of images of the data set to score; all by default.
        seed: seed of the noise and of the random order of equal pixels.
    """

    summary = "Score with the least important pixels filled in, minus that with the most important, over two."
    axis = "share of the pixels"
    bounds = (-0.5, 0.5)

    def __init__(
        self, score: Score = "probability", noise: NonNegative = 0.01, images: Count | None = None, seed: int = 0
    ) -> None:
        self.noise, self.images = noise, images
        self._least_first = Perturbation(FRACTIONS, "least", score=score, seed=seed)

    def score(self, case: Case) -> Scores:
        """Return [B] with curves."""
        orders = (self._least_first, replace(self._least_first, order="most"))
        least, most = (road(case.model, case.inputs, case.maps, case.target, one, noise=self.noise) for one in orders)
        curve = (least - most) / 2
        return Scores(curve.mean(1), curve, FRACTIONS)
