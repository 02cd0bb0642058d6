"""Base of all reducers: options, and an accumulator that takes samples chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dave_vit._internal.registry import Registry
from dave_vit.errors import InputError


class Accumulator(Protocol):
    """Accumulates samples chunk by chunk; results are available after every chunk."""

    @property
    def count(self) -> int:
        """Number of samples so far."""

    @property
    def is_signed(self) -> bool:
        """Whether a negative value of the estimate is evidence against the class."""

    def update(self, samples: Tensor, weights: Tensor | None = None) -> None:
        """Accumulate samples [n,B,C,H,W], with weights [n,B] for all chunks or for none."""

    def attribution(self) -> Tensor:
        """Return the estimate so far: [B,C,H,W]."""

    def mean(self) -> Tensor:
        """Return the channel-summed average of the samples, whatever the estimate: [B,H,W]."""

    def standard_error(self) -> Tensor:
        """Return the standard error of the channel-summed mean: [B,H,W]; zeros below two samples."""

    def error_share(self) -> Tensor:
        """Return the share of the mean map's energy that is sampling error, [B]; it falls as one over the samples."""

    def significant(self) -> Tensor:
        """Return whether the map of each image is significant, [B]; True for reducers that do not test it."""

    def select(self, images: Tensor) -> Accumulator:
        """Select images by index, to continue with them alone."""


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
        raise InputError(f"weights shaped {list(weights.shape)}; expected one a sample: {list(samples.shape[:2])}")
    return samples.detach()


def energy_share(mean: Tensor, error: Tensor) -> Tensor:
    """Return the sum of squared errors over the sum of squares of a map, [...,H,W] -> [...]; 1 for a map of zeros."""
    energy = mean.square().sum((-1, -2))
    share = error.square().sum((-1, -2)) / energy.where(energy > 0, 1.0)
    return share.where(energy > 0, 1.0)
