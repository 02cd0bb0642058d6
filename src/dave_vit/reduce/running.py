"""Averages, and estimators that treat every pixel by itself."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype, working_dtype
from dave_vit.errors import InputError
from dave_vit.reduce.base import REDUCERS, Accumulator, MeanAndError, check_count, check_finite, check_samples
from dave_vit.reduce.weighted import Moments, weighted_sums

Factor = Callable[[Tensor, Tensor], Tensor]  # (mean map [B,H,W], standard error [B,H,W]) -> factor [B,H,W]


@REDUCERS.register("mean")
@dataclass(frozen=True)
class Mean:
    """The plain average, eq. (8)."""

    def accumulator(self) -> Accumulator:
        """Return a new accumulator."""
        return _Running(None)


@REDUCERS.register("shrinkage")
@dataclass(frozen=True)
class Shrinkage:
    """The average times max(0, 1 - e^2/a^2) per pixel, with a the channel-summed mean and e its standard error.

    The factor is 0 where a is 0. A single sample has no spread and is left as it is.
    """

    def accumulator(self) -> Accumulator:
        """Return a new accumulator."""
        return _Running(_shrinkage)


@REDUCERS.register("soft")
@dataclass(frozen=True)
class SoftThreshold:
    """The average moved towards zero by k standard errors: times max(0, |a| - k e) / |a| per pixel.

    The factor is 0 where a is 0. A single sample has no spread and is left as it is.

    Args:
        k: how many standard errors.
    """

    k: float = 2.0

    def __post_init__(self) -> None:
        check_finite("k", self.k)

    def accumulator(self) -> Accumulator:
        """Return a new accumulator."""
        return _Running(lambda a, e: (a.abs() - self.k * e).clamp(min=0) / _nonzero(a.abs()))


@REDUCERS.register("trimmed")
@dataclass(frozen=True)
class TrimmedMean:
    """The average of what is within k robust standard deviations (1.4826 MAD) of the median, element by element.

    Medians need all samples at once, so memory grows with their number. The standard error is that of all samples:
    elements are trimmed one by one, which leaves no channel sum to take a spread of.

    Args:
        k: how many robust standard deviations.
        floor: added to the robust standard deviation, so that where most samples are equal, as at zero outside of the
            warped image, rounding is not taken for outliers; the default is what the authors' public code adds.
    """

    takes_weights: ClassVar[bool] = False
    k: float = 2.5
    floor: float = 1e-8

    def __post_init__(self) -> None:
        check_finite("k", self.k)
        check_finite("floor", self.floor)

    def accumulator(self) -> Accumulator:
        """Return a new accumulator."""
        return _Trimmed(self)


class _Running(MeanAndError):
    """Mean of the samples, and squared deviations of their channel sums, merged chunk by chunk (Chan et al.).

    The sums are kept in float64, so that how the samples were chunked does not show in the result.
    """

    def __init__(self, factor: Factor | None) -> None:
        super().__init__()
        self._factor = factor
        self._mean = torch.empty(0)  # [B,C,H,W]
        self._squares = torch.empty(0)  # [B,H,W]
        self._moments: Moments | None = None  # used instead if samples have weights

    def update(self, samples: Tensor, weights: Tensor | None = None) -> None:
        samples = check_samples(samples, weights, tuple(self._mean.shape) if self.count else None)
        if self.count and (weights is None) != (self._moments is None):
            raise InputError("some samples have weights and some have none; give weights to all of them or to none")
        if weights is not None:
            self._moments = self._moments or Moments()
            self._moments.add(samples, weights)
            self._mean, self.count = self._moments.mean, self.count + len(samples)
        else:
            self._merge(samples)
        self._dtype = working_dtype(samples.dtype)

    def _merge(self, samples: Tensor) -> None:
        wide = precise_dtype(samples.device)
        n, total = len(samples), self.count + len(samples)
        if samples.is_cuda:  # in one pass over them
            added, first, second = weighted_sums(samples, samples.new_ones(samples.shape[:2], dtype=wide))
            mean, squares = added / n, (second - first.square() / n).clamp(min=0)
        else:
            mean = samples.mean(0, dtype=wide)  # [B,C,H,W]
            sums = samples.sum(2, dtype=wide)  # [n,B,H,W]
            squares = (sums - sums.mean(0)).square().sum(0)  # [B,H,W]
        if self.count:
            step = mean - self._mean
            squares += self._squares + step.sum(1).square() * (self.count * n / total)
            mean = self._mean + step * (n / total)
        self._mean, self._squares, self.count = mean, squares, total

    def attribution(self) -> Tensor:
        check_count(self.count)
        if self._factor is None or self.count < 2:
            return self._mean.to(self._dtype)
        factor = self._factor(*self._mean_and_error())  # [B,H,W]
        return (self._mean * factor[:, None]).to(self._dtype)

    def significant(self) -> Tensor:
        check_count(self.count)
        return torch.ones(len(self._mean), dtype=torch.bool, device=self._mean.device)

    def select(self, images: Tensor) -> Self:
        part, at = copy(self), images.to(self._mean.device)
        part._mean = self._mean[at]
        if self._moments is None:
            part._squares = self._squares[at]
        else:
            part._moments = self._moments.select(images)
        return part

    def _mean_and_error(self) -> tuple[Tensor, Tensor]:
        if self._moments is not None:
            return self._mean.sum(1), self._moments.error
        # With one sample the squares are zero, and so is the error.
        return self._mean.sum(1), (self._squares / (max(self.count - 1, 1) * self.count)).sqrt()


class _Trimmed(_Running):
    """Keeps every sample without a copy: callers must not overwrite the tensors they passed in."""

    def __init__(self, options: TrimmedMean) -> None:
        super().__init__(None)
        self._options = options
        self._chunks: list[Tensor] = []

    def update(self, samples: Tensor, weights: Tensor | None = None) -> None:
        if weights is not None:
            raise InputError("the trimmed mean takes no weights; use another reducer, or views that count alike")
        super().update(samples)
        self._chunks.append(samples.detach().to(working_dtype(samples.dtype)))

    def attribution(self) -> Tensor:
        check_count(self.count)
        self._chunks = [torch.cat(self._chunks)]
        # One image at a time: the medians' working memory is several times that of what they look at.
        return torch.stack([_trimmed_mean(samples, self._options) for samples in self._chunks[0].unbind(1)])

    def select(self, images: Tensor) -> Self:
        part = super().select(images)
        part._chunks = [chunk[:, images.to(chunk.device)] for chunk in self._chunks]
        return part


def _trimmed_mean(samples: Tensor, options: TrimmedMean) -> Tensor:
    """[n,...] -> [...]; of an even number of values, the lower middle one is the median."""
    deviation = (samples - samples.median(0).values).abs()
    kept = deviation <= options.k * (1.4826 * deviation.median(0).values + options.floor)
    return torch.where(kept, samples, 0).sum(0) / kept.sum(0)  # the median itself is always kept


def _shrinkage(a: Tensor, e: Tensor) -> Tensor:
    # The ratio before its square: a tiny a would underflow when squared. Where a is 0, so is the factor.
    return (1 - (e / _nonzero(a)).square()).clamp(min=0) * (a != 0)


def _nonzero(a: Tensor) -> Tensor:
    return torch.where(a == 0, 1, a)
