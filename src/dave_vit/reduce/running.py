"""Averages, and estimators that treat every pixel by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit._internal.schema import Checked, NonNegative
from dave_vit.errors import InputError
from dave_vit.reduce.base import REDUCERS, Accumulator

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
class SoftThreshold(Checked):
    """The average moved towards zero by k standard errors: times max(0, |a| - k e) / |a| per pixel.

    The factor is 0 where a is 0. A single sample has no spread and is left as it is.

    Args:
        k: how many standard errors.
    """

    k: NonNegative = 2.0

    def accumulator(self) -> Accumulator:
        """Return a new accumulator."""
        return _Running(lambda a, e: (a.abs() - self.k * e).clamp(min=0) / _nonzero(a.abs()))


@REDUCERS.register("trimmed")
@dataclass(frozen=True)
class TrimmedMean(Checked):
    """The average of what is within k robust standard deviations (1.4826 MAD) of the median, element by element.

    Medians need all samples at once, so memory grows with their number. The standard error is that of all samples:
    elements are trimmed one by one, which leaves no channel sum to take a spread of.

    Args:
        k: how many robust standard deviations.
        floor: added to the robust standard deviation, so that where most samples are equal, as at zero outside of the
            warped image, rounding is not taken for outliers; the default is what the authors' public code adds.
    """

    takes_weights: ClassVar[bool] = False
    k: NonNegative = 2.5
    floor: NonNegative = 1e-8

    def accumulator(self) -> Accumulator:
        """Return a new accumulator."""
        return _Trimmed(self)


class _Running(Accumulator):
    """The mean of the samples, times a factor for each pixel if there is one."""

    def __init__(self, factor: Factor | None) -> None:
        super().__init__()
        self._factor = factor

    def attribution(self) -> Tensor:
        summed, error = self._mean_and_error()  # [B,H,W] each
        mean = self._moments.mean  # [B,C,H,W]
        factor = None if self._factor is None or self.count < 2 else self._factor(summed, error)
        return (mean if factor is None else mean * factor[:, None]).to(self._dtype)


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
        self._mean_and_error()  # refuses to go on without samples
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
