"""Evidence that is significant at every scale: fine structure where the evidence around it is significant as well."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Self

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype, working_dtype
from dave_vit._internal.schema import Checked, Limits
from dave_vit.reduce.base import REDUCERS, Accumulator
from dave_vit.reduce.moments import MeanAndError, Moments

_MIDDLE, _COARSE = 3 / 16, 1 / 2  # standard deviations of the Gaussians, in patches


@REDUCERS.register("significant")
@dataclass(frozen=True)
class Significant(Checked):
    """Net evidence that exceeds k standard errors at its own scale and at the coarser ones.

    Three maps of each sample are followed: its channel sums, and these averaged by Gaussians of 3/16 and 1/2 of a
    patch. With a the mean of a scale over the samples, e its standard error and P = max(0, a - k e), the map is

        unit(P0 gate1 gate2) + unit(P1 gate2) / 2 + unit(a2 - e2) / 2,    gate = P / |a|,

    where unit divides by the sum of what is positive: fine structure, the evidence around it, and a lower bound of the
    coarse evidence, which orders what is not significant by itself. A negative pixel therefore means that nothing
    speaks for the class there, and not how much speaks against it. Scaled so that its positive part sums up to the
    positive part of the coarse evidence. Where nothing is significant it is the mean.

    Args:
        k: how many standard errors.
        patch: side of the model's patches in pixels.
    """

    k: Annotated[float, Limits(at_least=0)] = 2.0
    patch: Annotated[float, Limits(at_least=0)] = 16.0

    def accumulator(self) -> Accumulator:
        """Return a new accumulator."""
        return ScaleMoments(self)


class ScaleMoments(MeanAndError):
    """Weighted moments of the samples and of their averages at two coarser scales."""

    is_signed = False  # a negative value means that nothing speaks for the class

    def __init__(self, options: Significant) -> None:
        super().__init__()
        self._k = options.k
        self._sigmas = (_MIDDLE * options.patch, _COARSE * options.patch)
        self._coarser = (Moments(), Moments())
        self._cached_evidence: tuple[Tensor, Tensor, Tensor] | None = None  # the evidence of all samples so far

    def _add(self, samples: Tensor, weights: Tensor) -> None:
        super()._add(samples, weights)
        sums = samples.sum(2, dtype=working_dtype(samples.dtype))  # [n,B,H,W]
        for sigma, moments in zip(self._sigmas, self._coarser, strict=True):
            moments.add(blur(sums, sigma).unsqueeze(2), weights)
        self._cached_evidence = None

    def attribution(self) -> Tensor:
        """Return the estimate so far: [B,C,H,W]."""
        a, _ = self._mean_and_error()
        mean = self._moments.mean  # [B,C,H,W]
        fine, rest = self._parts()
        scale = self._scale(fine + rest)
        shared = mean * (fine / torch.where(a == 0, 1, a)).unsqueeze(1)  # channels as in the mean
        spread = (rest / mean.shape[1]).unsqueeze(1)
        is_significant = self.significant().view(-1, 1, 1, 1)
        return torch.where(is_significant, (shared + spread) * scale.view(-1, 1, 1, 1), mean).to(self._dtype)

    def significant(self) -> Tensor:
        """Return whether anything is significant in the map of each image, [B]."""
        fine, middle, _ = self._evidence()
        return (fine > 0).flatten(1).any(1) | (middle > 0).flatten(1).any(1)

    def select(self, images: Tensor) -> Self:
        """Select images by index, to continue with them alone."""
        part = super().select(images)
        first, second = (moments.select(images) for moments in self._coarser)
        part._coarser, part._cached_evidence = (first, second), None
        return part

    def _evidence(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return fine, middle and coarse evidence, [B,H,W] each."""
        if self._cached_evidence is None:
            self._cached_evidence = self._gate_evidence()
        return self._cached_evidence

    def _gate_evidence(self) -> tuple[Tensor, Tensor, Tensor]:
        scales = (self._moments, *self._coarser)
        means, errors = [one.mean.sum(1) for one in scales], [one.error for one in scales]
        over = [(a - self._k * e).clamp(min=0) for a, e in zip(means, errors, strict=True)]
        gates = [p / torch.where(a == 0, 1, a.abs()) for p, a in zip(over, means, strict=True)]
        return over[0] * gates[1] * gates[2], over[1] * gates[2], means[2] - errors[2]

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return the terms of the map, [B,H,W] each: the fine one, which keeps the mean's channels, and the rest."""
        fine, middle, coarse = self._evidence()
        return _unit(fine), (_unit(middle) + _unit(coarse)) / 2

    def _scale(self, terms: Tensor) -> Tensor:
        """Return the factor with which what is positive sums up to the positive part of the coarse evidence, [B]."""
        amount = self._coarser[1].mean.sum(1).clamp(min=0).sum((1, 2))
        total = terms.clamp(min=0).sum((1, 2))
        return amount / torch.where(total > 0, total, 1)


def blur(maps: Tensor, sigma: float) -> Tensor:
    """Blur maps [...,H,W] with a Gaussian that is cut off at three standard deviations.

    At the border only pixels of the image count. As two products of matrices: a window for each pixel would take fifty
    times the memory of the maps.
    """
    wide = maps.to(precise_dtype(maps.device))  # float32 might be rounded to TF32
    rows, columns = (_gaussian(side, sigma, wide.dtype, wide.device) for side in maps.shape[-2:])
    return (rows @ (wide @ columns.T)).to(maps.dtype)


@lru_cache(maxsize=8)
def _gaussian(side: int, sigma: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix of a Gaussian filter along a line, [side,side]; rows sum to one."""
    at = torch.arange(side, dtype=dtype, device=device)
    apart = at[:, None] - at
    weights = torch.exp(-apart.square() / (2 * max(sigma, 1e-6) ** 2)) * (apart.abs() <= int(3 * sigma))
    return weights / weights.sum(1, keepdim=True)


def _unit(maps: Tensor) -> Tensor:
    """Divide each map by the sum of its positive part; zeros where there is none."""
    total = maps.clamp(min=0).sum((1, 2), keepdim=True)
    return torch.where(total > 0, maps / torch.where(total > 0, total, 1), 0)
