"""ROAD (remove and debias): removed pixels are imputed from their neighbours, so that no visible hole remains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.metrics.base import METRICS, Case, Metric, Scores, check_at_least
from dave_vit.metrics.perturbation import Model, Perturbation, Score, check_batch, removal_curve
from dave_vit.neighborhood.draws import sample_generator

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
    passes = 2 * len(FRACTIONS)

    def __init__(
        self, score: Score = "probability", noise: float = 0.01, images: int | None = None, seed: int = 0
    ) -> None:
        check_at_least(0, noise=noise)
        check_at_least(1, images=images)
        self.noise, self.images = noise, images
        self._least_first = Perturbation(FRACTIONS, "least", score=score, seed=seed)

    def score(self, case: Case) -> Scores:
        """Return [B] with curves."""
        least, most = (
            road(case.model, case.inputs, case.maps, case.target, perturbation, noise=self.noise)
            for perturbation in (self._least_first, replace(self._least_first, order="most"))
        )
        curve = (least - most) / 2
        return Scores(curve.mean(1), curve, FRACTIONS)
