"""Base of all reducers and of their accumulators: running moments of weighted samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import Protocol, Self

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype, working_dtype
from dave_vit._internal.registry import Registry
from dave_vit.engine.fast import kernels
from dave_vit.errors import InputError

_LEAST = 1e-30  # weights that are all zero are then all alike
_CHANNELS = 16  # up to which a tile of the kernel fits


class Reducer(Protocol):
    """Options of an estimator."""

    def accumulator(self) -> Accumulator:
        """Return a new accumulator."""


def uses_clean(reducer: object) -> bool:
    """Return whether a reducer takes the evidence of the clean image: ``accumulator(clean)``."""
    return bool(getattr(reducer, "uses_clean", False))


REDUCERS: Registry[Callable[..., Reducer]] = Registry("reducer")


def check_samples(samples: Tensor, weights: Tensor | None, image: tuple[int, ...] | None) -> Tensor:
    """Return the samples without their graph, if they fit earlier samples and their weights.

    Args:
        samples: [n,B,C,H,W].
        weights: [n,B], or None.
        image: [B,C,H,W] of the samples before.
    """
    expected = "[n,B,C,H,W]" if image is None else f"[n,{','.join(map(str, image))}]"
    fits = samples.ndim == 5 and len(samples) > 0 and (image is None or tuple(samples.shape[1:]) == image)
    if not fits or not samples.is_floating_point():
        raise InputError(f"samples are {samples.dtype} shaped {list(samples.shape)}; expected floats shaped {expected}")
    if weights is not None and weights.shape != samples.shape[:2]:
        raise InputError(f"weights shaped {list(weights.shape)}; expected one per sample: {list(samples.shape[:2])}")
    return samples.detach()


def energy_share(mean: Tensor, error: Tensor) -> Tensor:
    """Return the sum of squared errors over the sum of squares of a map, [...,H,W] -> [...]; 1 for a map of zeros."""
    energy = mean.square().sum((-1, -2))
    share = error.square().sum((-1, -2)) / energy.where(energy > 0, 1.0)
    return share.where(energy > 0, 1.0)


def weighted_sums(samples: Tensor, weights: Tensor, center: Tensor | float = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of w x, of w^2 s and of w^2 s^2 over samples x, s being the sum of x over its channels - center.

    Args:
        samples: ``[n,B,C,...]``.
        weights: ``[n,B]``, in the device's widest type.
        center: ``[B,...]``; zero on CUDA.

    Returns:
        ``[B,C,...]``, ``[B,...]`` and ``[B,...]`` in that type.
    """
    if samples.shape[2] <= _CHANNELS and kernels.are_available(samples):
        return kernels.load().weighted_sums(samples, weights)  # type: ignore[no-any-return]
    x = samples.to(weights.dtype)
    sums, squares = x.sum(2) - center, weights.square()  # [n,B,...], [n,B]
    by = "nb,nb...->b..."
    return torch.einsum(by, weights, x), torch.einsum(by, squares, sums), torch.einsum(by, squares, sums.square())


class Moments:
    """Weighted sums of samples [n,B,C,...], and what follows from them for their channel sums [n,B,...].

    With weights w that add up to 1, the mean is a = sum w s and the square of its standard error is
    sum w^2 (s - a)^2 / (1 - sum w^2), which for equal weights is the usual one.
    """

    def __init__(self) -> None:
        self._weight = torch.zeros(())  # sum of w, [B]
        self._square = torch.zeros(())  # sum of w^2, [B]
        self._total = torch.zeros(())  # sum of w x, [B,C,...]
        self._center: Tensor | None = None  # c, the first sample, so that large sums do not cancel, [B,...]
        self._first = torch.zeros(())  # sum of w^2 (s - c), [B,...]
        self._second = torch.zeros(())  # sum of w^2 (s - c)^2, [B,...]
        self._error: Tensor | None = None  # cached until the next sample

    def add(self, samples: Tensor, weights: Tensor) -> None:
        """Add samples [n,B,C,...] with weights [n,B]."""
        wide = precise_dtype(samples.device)
        w = weights.detach().to(samples.device, wide).clamp(min=_LEAST)
        if self._center is None:
            self._center = samples[0].sum(1, dtype=wide) * (not samples.is_cuda)  # the kernel sums what is there
        total, first, second = weighted_sums(samples, w, self._center)
        self._weight, self._square = self._weight + w.sum(0), self._square + w.square().sum(0)
        self._total, self._first, self._second = self._total + total, self._first + first, self._second + second
        self._error = None

    def select(self, images: Tensor) -> Moments:
        """Select images by index."""
        part = Moments()
        for name, value in vars(self).items():
            setattr(part, name, None if value is None else value[images.to(value.device)])
        return part

    @property
    def mean(self) -> Tensor:
        """Weighted mean of the samples: [B,C,...]."""
        return self._total / _along(self._weight, self._total)

    @property
    def error(self) -> Tensor:
        """Standard error of the channel-summed mean: [B,...]; zeros where one sample has all the weight."""
        if self._error is None:
            self._error = self._spread()
        return self._error

    def _spread(self) -> Tensor:
        a = self.mean.sum(1) - (0 if self._center is None else self._center)
        squares = self._second - 2 * a * self._first + a.square() * _along(self._square, a)
        left = (self._weight.square() - self._square).clamp(min=0)  # A^2 - B
        known = left > self._weight.square() * 1e-12
        variance = squares.clamp(min=0) / _along(left.where(known, 1.0), a)
        return variance.sqrt() * _along(known.to(a.dtype), a)


def _along(per_image: Tensor, like: Tensor) -> Tensor:
    """Reshape [B] to [B,1,...], to broadcast with a tensor [B,...]."""
    return per_image.to(like.device).reshape(-1, *[1] * (like.ndim - 1))


class Accumulator(ABC):
    """Accumulates samples chunk by chunk; results are available after every chunk.

    Attributes:
        count: number of samples so far.
        is_signed: whether a negative value of the estimate is evidence against the class.
    """

    is_signed = True

    def __init__(self) -> None:
        self.count = 0
        self._dtype = torch.float32  # of the results
        self._shape: tuple[int, ...] | None = None  # of a sample
        self._is_weighted = False
        self._moments = Moments()

    def update(self, samples: Tensor, weights: Tensor | None = None) -> None:
        """Accumulate samples [n,B,C,H,W] with weights [n,B], or with equal ones."""
        samples = check_samples(samples, weights, self._shape)
        if self.count and (weights is not None) != self._is_weighted:
            raise InputError("some samples have weights and some have none; give weights to all of them or to none")
        self._is_weighted = weights is not None
        self._add(samples, samples.new_ones(samples.shape[:2]) if weights is None else weights)
        self._dtype, self._shape = working_dtype(samples.dtype), tuple(samples.shape[1:])
        self.count += len(samples)

    @abstractmethod
    def attribution(self) -> Tensor:
        """Return the estimate so far: [B,C,H,W]."""

    def mean(self) -> Tensor:
        """Return the channel-summed average of the samples, whatever the estimate: [B,H,W]."""
        return self._mean_and_error()[0].to(self._dtype)

    def standard_error(self) -> Tensor:
        """Return the standard error of the channel-summed mean: [B,H,W]; zeros below two samples."""
        return self._mean_and_error()[1].to(self._dtype)

    def error_share(self) -> Tensor:
        """Return the share of the mean map's energy that is sampling error, [B]; it falls as one over the samples."""
        return energy_share(*self._mean_and_error())

    def significant(self) -> Tensor:
        """Return whether the map of each image is significant, [B]: every map where nothing tests it."""
        mean, _ = self._mean_and_error()
        return torch.ones(len(mean), dtype=torch.bool, device=mean.device)

    def select(self, images: Tensor) -> Self:
        """Select images by index, to continue with them alone."""
        part = copy(self)
        part._moments = self._moments.select(images)
        part._shape = None if self._shape is None else (len(images), *self._shape[1:])
        return part

    def _add(self, samples: Tensor, weights: Tensor) -> None:
        self._moments.add(samples, weights)

    def _mean_and_error(self) -> tuple[Tensor, Tensor]:
        """Return both in the type of the sums: [B,H,W] each."""
        if not self.count:
            raise InputError("no samples to reduce; update the accumulator with at least one")
        return self._moments.mean.sum(1), self._moments.error
