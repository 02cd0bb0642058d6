"""What is explained, brought into one form at the door: class indices, several of them, or any score of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from dave_vit.errors import OutputError, TargetError

if TYPE_CHECKING:
    import numpy as np

Score = Callable[..., Tensor]
"""From a model's output, as the model returns it, to one number an image ``[B]``."""


@dataclass(frozen=True, eq=False)
class Target:
    """What is explained of each image of a batch; ``Target.of`` makes one of all that a user may give.

    Attributes:
        indices: classes ``[]`` (one for all images), ``[B]`` or ``[B, K]``; None where they are not known yet.
        score: a function of the model's output to one number an image, in the place of classes.
        places: ``[B, H, W]``, where in each image a score of a place looks, once views moved it.
    """

    indices: Tensor | None = None
    score: Score | None = None
    places: Tensor | None = None

    @classmethod
    def of(cls, wanted: TargetLike, batch: int) -> Target:
        """The target that is meant, if it fits the batch.

        Args:
            wanted: an index for all images, one index an image, a row of indices an image (lists, ranges, numpy arrays
                or tensors), a function of the model's output to one score an image, or None for the predicted
                class.
            batch: how many images there are.
        """
        if wanted is None:
            return cls()
        if isinstance(wanted, Target):
            return wanted._fitting(batch)
        if callable(wanted) and not isinstance(wanted, Tensor):
            return cls(score=wanted)
        return cls(_indices(wanted))._fitting(batch)

    @property
    def several(self) -> bool:
        """Whether each image has a row of classes of its own: results then have a dimension for them."""
        return self.indices is not None and self.indices.ndim == 2

    @property
    def known(self) -> bool:
        """Whether nothing is left to be found out on the clean image."""
        return self.score is not None or self.indices is not None

    def resolve(self, logits: Tensor) -> Target:
        """The same with its classes known: ``[B]``, or ``[B, K]``; checked against the model's classes."""
        if self.score is not None:
            return self
        batch, classes = logits.shape
        if self.indices is None:
            return replace(self, indices=logits.detach().argmax(1))
        indices = self._fitting(batch).indices
        indices = indices.to(logits.device).expand(batch) if indices.ndim == 0 else indices.to(logits.device)  # type: ignore[union-attr]
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= classes:
            raise TargetError(
                f"target {low if low < 0 else high} is out of range; the model has classes 0 to {classes - 1}"
            )
        return replace(self, indices=indices)

    def read(self, output: Any, batch: int) -> Tensor:
        """What is looked at in a model's output: logits ``[B, classes]``, or ``[B, 1]``, the values of the score."""
        if self.score is None:
            return class_logits(output, batch)
        score = self.score(output) if self.places is None else self.score(output, self.places)
        given = tuple(score.shape) if isinstance(score, Tensor) else None
        if given != (batch,):
            what = type(score).__name__ if given is None else f"shape {given}"
            raise TargetError(f"the score function returned {what}; it must return one number an image, [{batch}]")
        return score.unsqueeze(1)

    def rows(self, logits: Tensor) -> Tensor:
        """The explained numbers: ``[K, B]``, one row for each backward pass."""
        if self.score is not None:
            return logits.T  # the scores, as they were read
        indices = self.resolve(logits).columns
        indices = indices.clone() if indices.is_inference() else indices  # autograd keeps no tensors of inference mode
        return logits.gather(1, indices).T  # [K, B]

    @property
    def columns(self) -> Tensor:
        """The classes of a resolved target, always ``[B, K]``."""
        if self.indices is None or self.indices.ndim == 0:
            raise TargetError("a score function has no class indices; give an int, a list or a tensor of indices")
        return self.indices.reshape(len(self.indices), -1)

    def part(self, start: int, stop: int) -> Target:
        """What is explained of some images of the batch."""
        if self.places is not None:
            return replace(self, places=self.places[start:stop])
        if self.indices is None or self.indices.ndim == 0:
            return self
        return replace(self, indices=self.indices[start:stop])

    def singles(self) -> list[Target]:
        """One target for each of the K classes of an image."""
        if not self.several or self.indices is None:
            return [self]
        return [replace(self, indices=column) for column in self.indices.unbind(1)]

    def repeated(self, times: int) -> Target:
        """For that many copies of the batch, one after the other."""
        if self.indices is None or self.indices.ndim == 0:
            return self
        return replace(self, indices=self.indices.repeat(times, *[1] * (self.indices.ndim - 1)))

    def _fitting(self, batch: int) -> Target:
        indices = self.indices
        if indices is not None and indices.ndim > 0 and (indices.ndim > 2 or indices.shape[0] != batch):
            raise TargetError(
                f"target has shape {tuple(indices.shape)} for a batch of {batch}; give one index, [{batch}] indices, "
                f"or [{batch}, K] indices"
            )
        return self


TargetLike: TypeAlias = (
    "int | Sequence[int] | Sequence[Sequence[int]] | np.ndarray[Any, Any] | Tensor | Score | Target | None"
)
"""All that may be given as a target; see ``Target.of``."""


def class_logits(output: Any, batch: int) -> Tensor:
    """The logits ``[B, classes]`` of a classifier's output: a tensor, or an object that holds them under ``logits``."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise OutputError(
            f"the model returned {type(output).__name__}; it must return logits [batch, classes]: wrap it in a module "
            "that picks them out, or give a function of its output as the target"
        )
    if logits.ndim != 2 or logits.shape[0] != batch:
        raise OutputError(
            f"the model returned shape {tuple(logits.shape)} for a batch of {batch}; it must return logits "
            "[batch, classes]: wrap it in a module that picks or pools them, or give a function of its output as the "
            "target"
        )
    return logits


def resolve_target(logits: Tensor, target: TargetLike) -> Tensor:
    """Class indices for a batch: ``[B]``, or ``[B, K]`` where several classes of each image are asked for."""
    resolved = Target.of(target, len(logits)).resolve(logits)
    return resolved.columns if resolved.several else resolved.columns[:, 0]


def _indices(wanted: Any) -> Tensor:
    given = list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str | bytes) else wanted
    try:
        indices = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TargetError(
            f"target is of type {type(wanted).__name__}; give class indices as integers, or a function of the output"
        ) from error
    if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
        raise TargetError(f"target has type {indices.dtype}; give class indices as integers")
    return indices.long()
