"""From attribution samples to one attribution: averages and estimators that use the spread of the samples.

A reducer is a frozen set of options; its accumulator takes samples [n,B,C,H,W] in chunks of any size and gives, at any
time, the attribution [B,C,H,W] and the standard error [B,H,W] of the channel-summed samples' mean. All but the trimmed
mean need memory that does not depend on the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dave_vit.errors import InputError, OptionError
from dave_vit.precision import precise_dtype, working_dtype
from dave_vit.registry import Registry

Factor = Callable[[Tensor, Tensor], Tensor]  # (mean map [B,H,W], standard error [B,H,W]) -> factor [B,H,W]


class Accumulator(Protocol):
    """Takes samples chunk by chunk; the results may be asked for after every chunk."""

    @property
    def count(self) -> int:
        """How many samples were taken."""

    def update(self, samples: Tensor) -> None:
        """Takes samples [n,B,C,H,W]."""

    def attribution(self) -> Tensor:
        """The estimate so far: [B,C,H,W]."""

    def standard_error(self) -> Tensor:
        """How far the channel-summed mean may be off: [B,H,W]; zeros below two samples, where nothing is known."""


class Reducer(Protocol):
    """Options of an estimator."""

    def accumulator(self) -> Accumulator:
        """A fresh accumulator."""


REDUCERS: Registry[Callable[..., Reducer]] = Registry("reducer")


@REDUCERS.register("mean")
@dataclass(frozen=True)
class Mean:
    """The plain average, eq. (8)."""

    def accumulator(self) -> Accumulator:
        """A fresh accumulator."""
        return _Running(None)


@REDUCERS.register("shrinkage")
@dataclass(frozen=True)
class Shrinkage:
    """The average times max(0, 1 - e^2/a^2) per pixel, with a the channel-summed mean and e its standard error.

    The factor is 0 where a is 0. A single sample has no spread and is left as it is.
    """

    def accumulator(self) -> Accumulator:
        """A fresh accumulator."""
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
        _check_k(self.k)

    def accumulator(self) -> Accumulator:
        """A fresh accumulator."""
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

    k: float = 2.5
    floor: float = 1e-8

    def __post_init__(self) -> None:
        _check_k(self.k)
        if not 0 <= self.floor < float("inf"):
            raise OptionError(f"floor is {self.floor}; expected a finite number, 0 or above")

    def accumulator(self) -> Accumulator:
        """A fresh accumulator."""
        return _Trimmed(self)


class _Running:
    """Mean of the samples, and squared deviations of their channel sums, merged chunk by chunk (Chan et al.).

    The sums are kept in float64, so that how the samples were chunked does not show in the result.
    """

    def __init__(self, factor: Factor | None) -> None:
        self.count = 0
        self._factor = factor
        self._mean = torch.empty(0)  # [B,C,H,W]
        self._squares = torch.empty(0)  # [B,H,W]
        self._dtype = torch.float32

    def update(self, samples: Tensor) -> None:
        samples = _checked(samples, tuple(self._mean.shape) if self.count else None)
        wide = precise_dtype(samples.device)
        n, total = len(samples), self.count + len(samples)
        mean = samples.mean(0, dtype=wide)  # [B,C,H,W]
        sums = samples.sum(2, dtype=wide)  # [n,B,H,W]
        squares = (sums - sums.mean(0)).square().sum(0)  # [B,H,W]
        if self.count:
            step = mean - self._mean
            squares += self._squares + step.sum(1).square() * (self.count * n / total)
            mean = self._mean + step * (n / total)
        self._mean, self._squares, self.count = mean, squares, total
        self._dtype = working_dtype(samples.dtype)

    def attribution(self) -> Tensor:
        _check_count(self.count)
        if self._factor is None or self.count < 2:
            return self._mean.to(self._dtype)
        factor = self._factor(self._mean.sum(1), self._error())  # [B,H,W]
        return (self._mean * factor[:, None]).to(self._dtype)

    def standard_error(self) -> Tensor:
        _check_count(self.count)
        return self._error().to(self._dtype)

    def _error(self) -> Tensor:
        # With one sample the squares are zero, and so is the error.
        return (self._squares / (max(self.count - 1, 1) * self.count)).sqrt()


class _Trimmed:
    """Keeps every sample, as given: callers must not write over what they handed in."""

    def __init__(self, options: TrimmedMean) -> None:
        self._options = options
        self._all = _Running(None)
        self._chunks: list[Tensor] = []

    @property
    def count(self) -> int:
        return self._all.count

    def update(self, samples: Tensor) -> None:
        self._all.update(samples)
        self._chunks.append(samples.detach().to(working_dtype(samples.dtype)))

    def attribution(self) -> Tensor:
        _check_count(self.count)
        self._chunks = [torch.cat(self._chunks)]
        # One image at a time: the medians' working memory is several times that of what they look at.
        return torch.stack([_trimmed_mean(samples, self._options) for samples in self._chunks[0].unbind(1)])

    def standard_error(self) -> Tensor:
        return self._all.standard_error()


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


def _check_k(k: float) -> None:
    if not 0 <= k < float("inf"):
        raise OptionError(f"k is {k}; expected a finite number, 0 or above")


def _check_count(count: int) -> None:
    if not count:
        raise InputError("no samples to reduce; update the accumulator with at least one")


def _checked(samples: Tensor, image: tuple[int, ...] | None) -> Tensor:
    """The samples without their graph, if they fit those seen before."""
    expected = "[n,B,C,H,W]" if image is None else f"[n,{','.join(map(str, image))}]"
    fits = samples.ndim == 5 and len(samples) > 0 and (image is None or tuple(samples.shape[1:]) == image)
    if not fits or not samples.is_floating_point():
        raise InputError(f"samples are {samples.dtype} shaped {list(samples.shape)}; expected floats shaped {expected}")
    return samples.detach()
