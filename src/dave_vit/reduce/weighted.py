"""Running mean and standard error of weighted samples."""

from __future__ import annotations

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.fast import kernels

_LEAST = 1e-30  # weights that are all zero are then all alike
_CHANNELS = 16  # up to which a tile of the kernel fits


def weighted_sums(samples: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of w x, of w^2 s and of w^2 s^2 over samples x, with s the sum of x over its channels.

    Args:
        samples: ``[n,B,C,...]``.
        weights: ``[n,B]``, in the device's widest type.

    Returns:
        ``[B,C,...]``, ``[B,...]`` and ``[B,...]`` in that type.
    """
    if samples.shape[2] <= _CHANNELS and kernels.are_available(samples):
        sums_of_kernel: tuple[Tensor, Tensor, Tensor] = kernels.load().weighted_sums(samples, weights)
        return sums_of_kernel
    x = samples.to(weights.dtype)
    sums, squares = x.sum(2), weights.square()  # [n,B,...], [n,B]
    over = "nb,nb...->b..."
    return (
        torch.einsum(over, weights, x),
        torch.einsum(over, squares, sums),
        torch.einsum(over, squares, sums.square()),
    )


class Moments:
    """Weighted sums of samples [n,B,C,...], and what follows from them for their channel sums [n,B,...].

    With weights w that add up to 1, the mean is a = sum w s and the square of its standard error is
    sum w^2 (s - a)^2 / (1 - sum w^2), which for equal weights is the usual one.
    """

    def __init__(self) -> None:
        self._weight = torch.zeros(())  # sum of w, [B]
        self._square = torch.zeros(())  # sum of w^2, [B]
        self._total = torch.zeros(())  # sum of w x, [B,C,...]
        self._first = torch.zeros(())  # sum of w^2 s, [B,...]
        self._second = torch.zeros(())  # sum of w^2 s^2, [B,...]
        self._error: Tensor | None = None  # cached until the next sample

    def add(self, samples: Tensor, weights: Tensor) -> None:
        """Add samples [n,B,C,...] with weights [n,B]."""
        wide = precise_dtype(samples.device)
        w = weights.detach().to(samples.device, wide).clamp(min=_LEAST)
        total, first, second = weighted_sums(samples, w)
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
        a = self.mean.sum(1)
        squares = self._second - 2 * a * self._first + a.square() * _along(self._square, a)
        left = (self._weight.square() - self._square).clamp(min=0)  # A^2 - B
        known = left > self._weight.square() * 1e-12
        variance = squares.clamp(min=0) / _along(left.where(known, 1.0), a)
        return variance.sqrt() * _along(known.to(a.dtype), a)


def _along(per_image: Tensor, like: Tensor) -> Tensor:
    """Reshape [B] to [B,1,...], to broadcast with a tensor [B,...]."""
    return per_image.to(like.device).reshape(-1, *[1] * (like.ndim - 1))
