"""The estimate that a method computes from samples: attribution, mean and standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.targets import Target
from dave_vit.methods.explanation import Explanation
from dave_vit.reduce import Accumulator, Reducer


@dataclass(frozen=True)
class SampleEstimate:
    """Running estimate of the attributions of some images.

    Attributes:
        reducer: how samples become one map.
        accumulator: over samples ``[n, b * K, C, H, W]``.
        target: resolved.
        clean: evidence of the clean images ``[b, K, ..., H, W]``, for reducers that use it.
        postprocess: of the map, where the method prescribes one.
        frames: ``(T,)`` where clips are explained: each frame has a map of its own.
    """

    reducer: Reducer
    accumulator: Accumulator
    target: Target
    clean: Tensor | None = None
    postprocess: Callable[[Tensor], Tensor] | None = None
    frames: tuple[int, ...] = ()

    @classmethod
    def start(cls, reducer: Reducer, target: Target, clean: Tensor | None = None, **fields: Any) -> SampleEstimate:
        """Return the estimate before the first sample."""
        return cls(reducer, _make_accumulator(reducer, clean), target, clean, **fields)

    def restart(self, images: Tensor) -> SampleEstimate:
        """Select images by index, to start with them anew."""
        clean = None if self.clean is None else self.clean[images]
        return replace(
            self, accumulator=_make_accumulator(self.reducer, clean), target=self.target.select(images), clean=clean
        )

    def add(self, samples: Tensor, weights: Tensor | None = None) -> None:
        """Accumulate samples.

        Args:
            samples: attributions ``[n, b, K, C, H, W]``; clips have T before C.
            weights: how much each sample counts, ``[n, b * K]``; all the same by default.
        """
        flat = samples.flatten(1, -4)  # [n, b * K * T, C, H, W]
        if weights is None:
            self.accumulator.update(flat)
        else:
            self.accumulator.update(flat, weights.repeat_interleave(math.prod(self.frames), 1))

    def select(self, images: Tensor) -> SampleEstimate:
        """Select images by index, to continue with them alone."""
        maps = math.prod(self._maps)
        rows = (images[:, None] * maps + torch.arange(maps, device=images.device)).flatten()
        clean = None if self.clean is None else self.clean[images]
        part = self.accumulator.select(rows)
        return replace(self, accumulator=part, target=self.target.select(images), clean=clean)

    def has_converged(self, share: float) -> Tensor:
        """Return whether at most this share of the energy of each of an image's maps is sampling error, ``[b]``."""
        converged = self.accumulator.error_share() <= share  # [b * K * T]
        return converged.reshape(-1, math.prod(self._maps)).all(1)

    def explanation(self) -> Explanation:
        """Return the explanation after the samples so far."""
        total = self.accumulator
        parts = (total.attribution(), total.standard_error(), total.significant(), total.mean())
        attribution, error, significant, mean = (part.unflatten(0, (-1, *self._maps)) for part in parts)  # [b, K, T]
        return Explanation(
            attribution,
            self.target.indices,
            error,
            samples=total.count,
            postprocess=self.postprocess,
            against=self.target.against,
            significant=significant.any(-1) if self.frames else significant,
            drawn=torch.full((len(attribution),), total.count, device=attribution.device),
            mean=mean,
            is_signed=total.is_signed,
        )

    @property
    def _maps(self) -> tuple[int, ...]:
        """Number of maps of an image: ``(K,)``, or ``(K, T)`` for clips."""
        return (self.target.count, *self.frames)


def _make_accumulator(reducer: Reducer, clean: Tensor | None) -> Accumulator:
    """Return a new accumulator; a reducer that uses clean images takes their evidence, flattened as samples are."""
    make: Callable[..., Accumulator] = reducer.accumulator
    return make() if clean is None else make(clean.flatten(0, -5))
