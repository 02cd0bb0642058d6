"""The estimate that a method makes of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

    def add(self, samples: Tensor) -> None:
        """Takes attributions ``[n, b, C, H, W]``, or ``[n, b, K, C, H, W]``; clips have T before C."""
        self.accumulator.update(samples.flatten(1, -4))

    def explanation(self) -> Explanation:
        """The attribution of the samples taken so far, with its standard error."""
        parts = [self.accumulator.attribution(), self.accumulator.standard_error()]
        several = self.target.columns.shape[1:] if self.target.several else ()
        parts = [part.unflatten(0, (-1, *several, *self.frames)) for part in parts]  # [b * K * T] -> [b, K, T]
        return Explanation(parts[0], self.target.indices, parts[1], self.accumulator.count, self.postprocess)
