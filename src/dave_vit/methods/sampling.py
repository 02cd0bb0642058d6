"""The estimate that a method makes of samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dave_vit.methods.base import Explanation
from dave_vit.reduce import Accumulator
from dave_vit.targets import Target


@dataclass(frozen=True)
class Estimate:
    """Some images on their way through all samples.

    Attributes:
        accumulator: over samples ``[n, b * K, C, H, W]``.
        target: with its classes known.
        postprocess: of the map, where the method prescribes one.
        frames: ``(T,)`` where clips are explained: each frame has a map of its own.
    """

    accumulator: Accumulator
    target: Target
    postprocess: Callable[[Tensor], Tensor] | None = None
    frames: tuple[int, ...] = ()

    def add(self, samples: Tensor, weights: Tensor | None = None) -> None:
        """Takes samples, and how much they count.

        Args:
            samples: attributions ``[n, b, C, H, W]``, or ``[n, b, K, C, H, W]``; clips have T before C.
            weights: ``[n, b * K]``; all alike by default.
        """
        flat = samples.flatten(1, -4)  # [n, b * K * T, C, H, W]
        if weights is None:
            self.accumulator.update(flat)
        else:
            self.accumulator.update(flat, weights.repeat_interleave(math.prod(self.frames), 1))

    def select(self, images: Tensor) -> Estimate:
        """Those of the images of these numbers, to go on with them alone."""
        maps = math.prod(self._maps)
        rows = (images[:, None] * maps + torch.arange(maps, device=images.device)).flatten()
        return replace(self, accumulator=self.accumulator.select(rows), target=self.target.select(images))

    def settled(self, share: float) -> Tensor:
        """Whether no more than this share of the energy of any of an image's maps is sampling error, ``[b]``."""
        found = self.accumulator.error_share() <= share  # [b * K * T]
        return found.reshape(-1, math.prod(self._maps)).all(1)

    def explanation(self) -> Explanation:
        """The attribution of the samples taken so far, with its standard error."""
        made = self.accumulator
        parts = [made.attribution(), made.standard_error(), made.significant(), made.mean()]
        parts = [part.unflatten(0, (-1, *self._maps)) for part in parts]  # [b * K * T] -> [b, K, T]
        significant = parts[2].any(-1) if self.frames else parts[2]
        drawn = torch.full((len(parts[0]),), made.count, device=parts[0].device)
        found = Explanation(parts[0], self.target.indices, parts[1], made.count, self.postprocess)
        return replace(found, against=self.target.opponent, significant=significant, drawn=drawn, mean=parts[3])

    @property
    def _maps(self) -> tuple[int, ...]:
        """How many maps an image has: ``(K, T)``, without those that there are not."""
        several = tuple(self.target.columns.shape[1:]) if self.target.several else ()
        return (*several, *self.frames)
