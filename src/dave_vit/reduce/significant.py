"""Evidence that is significant at every scale, and the same sharpened by what only the clean image knows.

Views are moved by fractions of a patch, so their average loses what depends on the position of the patch grid and on
single pixels. Derivatives on the clean image itself bring it back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype, working_dtype
from dave_vit._internal.schema import Checked, NonNegative
from dave_vit.errors import InputError
from dave_vit.reduce.base import REDUCERS, Accumulator, Moments

_MIDDLE, _COARSE = 3 / 16, 1 / 2  # standard deviations of the Gaussians, in patches
_PIXEL = 3 / 16  # standard deviation of the Gaussian that takes dots out of the clean evidence, in patches
_EDGE = 1 / 8  # standard deviation of the Gaussian that softens the borders of patches, in patches
_PATCHES = 1.3  # weight of the evidence of patches
_MOST = 3.0  # of the constants' part in the amount of patch evidence


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

    k: NonNegative = 2.0
    patch: NonNegative = 16.0

    def accumulator(self) -> Accumulator:
        """Return a new accumulator."""
        return ScaleMoments(self)


class ScaleMoments(Accumulator):
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


@REDUCERS.register("sharpened")
@dataclass(frozen=True)
class Sharpened(Significant):
    """Significant evidence of the samples, multiplied and completed by the evidence of the clean image.

    Let d be the map of ``Significant``, R and A the maps of the clean image by the method's own rules and by AttnLRP's,
    and r and a the contributions of the model's additive constants, at their places, by the same rules:

        q     = balanced(R + r) + balanced(A + a)
        sharp = max(0, d) ((1 + squash(R)) (1 + squash(A)) (1 + squash(smooth(q)))) ^ detail
        map   = sharp + detail amount blurred(balanced(patches(q))) - against

    ``balanced`` divides by the sum of absolute values; squash(m) = m / (|m| + std(m)), for R and A after a blur by
    3/16 of a patch; ``patches`` takes the mean of each patch, and ``blurred``, by an 8th of it, takes away its edges;
    ``smooth`` is a continuous map with the same patch means.
    The amount is 1.3 (2 - c + min(3, p^2)), with c the correlation of R + r with the mean of the samples at patches and
    p = sum r / sum R: the clean image counts more where the views disagree with it, and where constants, which the
    samples leave out, carry the score. ``against`` is the coarse evidence that is negative by more than k standard
    errors. A negative value is therefore evidence against the class: significant over the views, or of a patch of the
    clean image. Scaled as ``Significant``; where nothing is significant it is the mean.

    Args:
        k: how many standard errors.
        patch: side of the model's patches in pixels.
        detail: how much the clean image counts; with less, the map changes less when the image moves.
    """

    uses_clean: ClassVar[bool] = True
    detail: NonNegative = 1.0

    def accumulator(self, clean: Tensor | None = None) -> Accumulator:
        """Return a new accumulator.

        Args:
            clean: evidence of the clean images ``[B, 2, 2, H, W]``: by the method's own rules and by AttnLRP's; of the
                pixels, and of constants at their places.
        """
        if clean is None:
            raise InputError("the reducer 'sharpened' needs the evidence of the clean image; use 'significant' without")
        return _Sharpened(self, clean)


class _Sharpened(ScaleMoments):
    """Weighted moments of the samples, and the evidence of the clean images."""

    is_signed = True

    def __init__(self, options: Sharpened, clean: Tensor) -> None:
        super().__init__(options)
        self._patch, self._detail = max(1, round(options.patch)), options.detail
        self._clean = clean.detach()  # a GPU may still be computing it: nothing reads it before the samples are there

    def select(self, images: Tensor) -> Self:
        part = super().select(images)
        part._clean = self._clean[images.to(self._clean.device)]
        return part

    def _parts(self) -> tuple[Tensor, Tensor]:
        fine, rest = super()._parts()
        clean = self._clean.to(precise_dtype(self._clean.device))
        evidence = _balance(clean.sum(2)).sum(1)  # with constants, by both rule sets alike: [B,H,W]
        gain = self._gain(clean, evidence) ** self._detail * (fine + rest > 0)
        return fine * gain, rest * gain + self._detail * self._patches(clean[:, 0], evidence) - self._against()

    def _gain(self, clean: Tensor, evidence: Tensor) -> Tensor:
        """Return the factor of the samples' evidence: [B,H,W]."""
        pixels = blur(clean[:, :, 0], _PIXEL * self._patch)  # [B,2,H,W]
        return (1 + _squash(pixels)).prod(1) * (1 + _squash(smooth_patches(evidence, self._patch)))

    def _patches(self, own: Tensor, evidence: Tensor) -> Tensor:
        """Return the evidence of whole patches of the clean image, from that by the method's own rules: [B,H,W]."""
        seen, views = (average_patches(one, self._patch) for one in (own.sum(1), self._moments.mean.sum(1)))
        pixels, constants = own.sum((2, 3)).unbind(1)
        missing = (constants / torch.where(pixels == 0, 1, pixels)).square().clamp(max=_MOST)
        amount = 2 - _correlate(seen, views).clamp(min=0) + missing  # [B]
        patches = _balance(average_patches(evidence, self._patch))
        return _PATCHES * amount.view(-1, 1, 1) * blur(patches, _EDGE * self._patch)

    def _against(self) -> Tensor:
        """Return the coarse evidence that is significantly negative, in the unit of the coarse term: [B,H,W]."""
        coarse = self._coarser[1]
        below = (-coarse.mean.sum(1) - self._k * coarse.error).clamp(min=0)
        total = self._evidence()[2].clamp(min=0).sum((1, 2), keepdim=True)
        return torch.where(total > 0, below / torch.where(total > 0, 2 * total, 1), 0)


def average_patches(maps: Tensor, patch: int) -> Tensor:
    """Replace each value of maps [...,H,W] by the mean of its patch."""
    return _filter(maps, _averaging, patch)


def smooth_patches(maps: Tensor, patch: int) -> Tensor:
    """Return continuous maps [...,H,W] whose patches have the means of those of the given ones."""
    return _filter(maps, _smoothing, patch)


@lru_cache(maxsize=8)
def _averaging(side: int, patch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix that averages a line by patches, [side,side]."""
    cell = torch.arange(side, device=device) // patch
    same = (cell[:, None] == cell).to(dtype)
    return same / same.sum(1, keepdim=True)


@lru_cache(maxsize=8)
def _smoothing(side: int, patch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix of a bilinear interpolation between patches that keeps their means, [side,side]."""
    average = _averaging(side, patch, dtype, device)[::patch]  # [cells,side]
    at = (torch.arange(side, dtype=dtype, device=device) + 0.5) / patch - 0.5
    apart = at.clamp(0, len(average) - 1)[:, None] - torch.arange(len(average), dtype=dtype, device=device)
    interpolate = (1 - apart.abs()).clamp(min=0)  # [side,cells]
    # Averaging what was interpolated mixes neighbouring patches; the inverse undoes it.
    unmix: Tensor = torch.linalg.inv((average @ interpolate).cpu()).to(device)
    return interpolate @ unmix @ average


def _balance(maps: Tensor) -> Tensor:
    """Divide each map by the sum of its absolute values; zeros stay zeros."""
    total = maps.abs().sum((-1, -2), keepdim=True)
    return maps / torch.where(total > 0, total, 1)


def _squash(maps: Tensor) -> Tensor:
    """Return the sign and size of each value compared with the spread of its map, from -1 to 1."""
    size = maps.abs() + maps.std((-1, -2), keepdim=True)
    return maps / torch.where(size > 0, size, 1)


def _correlate(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's coefficient of two maps [B,H,W], [B]; 0 where one is constant but for rounding."""
    whole = first.flatten(1).norm(dim=1) * second.flatten(1).norm(dim=1)
    first, second = (one.flatten(1) - one.flatten(1).mean(1, keepdim=True) for one in (first, second))
    size = first.norm(dim=1) * second.norm(dim=1)
    varies = size > 1e-10 * whole
    return torch.where(varies, (first * second).sum(1) / torch.where(varies, size, 1), 0)


def blur(maps: Tensor, sigma: float) -> Tensor:
    """Blur maps [...,H,W] with a Gaussian that is cut off at three standard deviations.

    At the border only pixels of the image count. As two products of matrices: a window for each pixel would take fifty
    times the memory of the maps.
    """
    return _filter(maps.to(precise_dtype(maps.device)), _gaussian, sigma).to(maps.dtype)  # TF32 might round float32


def _filter(maps: Tensor, matrix: Callable[..., Tensor], scale: float) -> Tensor:
    """Multiply rows and columns of maps [...,H,W] by matrices of one kind."""
    rows, columns = (matrix(side, scale, maps.dtype, maps.device) for side in maps.shape[-2:])
    return rows @ (maps @ columns.T)


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
