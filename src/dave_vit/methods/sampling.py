"""The estimate that a method makes of samples, and the images that are drawn around alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.targets import Target
from dave_vit.methods.base import Explanation, join_explanations
from dave_vit.methods.clean_prediction import CleanPrediction
from dave_vit.reduce import Accumulator


@dataclass(frozen=True)
class SampleEstimate:
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
            samples: attributions ``[n, b, K, C, H, W]``; clips have T before C.
            weights: ``[n, b * K]``; all alike by default.
        """
        flat = samples.flatten(1, -4)  # [n, b * K * T, C, H, W]
        if weights is None:
            self.accumulator.update(flat)
        else:
            self.accumulator.update(flat, weights.repeat_interleave(math.prod(self.frames), 1))

    def select(self, images: Tensor) -> SampleEstimate:
        """Those of the images of these numbers, to go on with them alone."""
        maps = math.prod(self._maps)
        rows = (images[:, None] * maps + torch.arange(maps, device=images.device)).flatten()
        return replace(self, accumulator=self.accumulator.select(rows), target=self.target.select(images))

    def has_converged(self, share: float) -> Tensor:
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
        return replace(found, against=self.target.against, significant=significant, drawn=drawn, mean=parts[3])

    @property
    def _maps(self) -> tuple[int, ...]:
        """How many maps an image has: ``(K,)``, or ``(K, T)`` for clips."""
        return (self.target.count, *self.frames)


@dataclass(frozen=True, eq=False)
class SampleGroup:
    """Images of a chunk that are drawn around alike.

    Attributes:
        where: their numbers in the chunk, ``[g]``.
        images: themselves.
        clean: what the model says of them, where it was asked.
        estimate: of their samples so far.
        rung: number of their neighbourhood.
        survived: sum over the first views of the predicted class's probability, relative to the clean image's.
        done: whether they need no more samples.
        part: whether they were more once: batches of their number may not come again.
    """

    where: Tensor
    images: Tensor
    clean: CleanPrediction | None
    estimate: SampleEstimate
    level: int
    survived: Tensor
    done: bool = False
    part: bool = False

    @property
    def drawn(self) -> int:
        """Views so far."""
        return self.estimate.accumulator.count

    def select(self, images: Tensor, **changes: Any) -> SampleGroup:
        """Some of them."""
        some: dict[str, Any] = {name: getattr(self, name)[images] for name in ("where", "images", "survived")}
        some["clean"] = None if self.clean is None else self.clean.select(images)
        some["estimate"] = changes.get("estimate") or self.estimate.select(images)
        some["part"] = self.part or len(images) < len(self.where)
        return replace(self, **{**some, **changes})

    def explanation(self) -> Explanation:
        """Of the samples so far."""
        return replace(self.estimate.explanation(), neighborhood_level=torch.full_like(self.where, self.level))


def merge_groups(groups: list[SampleGroup]) -> Explanation:
    """Of all images of a chunk in their order, after the samples so far."""
    found = join_explanations([group.explanation() for group in groups])
    return found.select(torch.cat([group.where for group in groups]).argsort()) if len(groups) > 1 else found
