"""What is explained, brought into one form at the door: classes, several of them, against others, or any score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.target_names import find_class
from dave_vit.errors import OutputError, TargetError

if TYPE_CHECKING:
    import numpy as np

Score = Callable[..., Tensor]
"""From a model's output, as the model returns it, to one number an image ``[B]``."""


@dataclass(frozen=True)
class Contrast:
    """A class against others: why this and not that? A target of every method.

    Against its rivals means the logit minus the average of all other logits, weighted by their softmax. The weights are
    taken once, on the clean image, and held.

    Args:
        target: as every target, but no score function.
        against: the index or name of one class, or of one class an image; "rivals"; None for the class by itself, also
            in methods that otherwise set it against its rivals.

    Example:
        >>> DAVE(model).attribute(images, Contrast("beer glass", against="red wine"))
    """

    target: TargetLike = None
    against: int | str | Sequence[int] | Sequence[str] | Tensor | None = None


@dataclass(frozen=True, eq=False)
class Target:
    """What is explained of each image of a batch; ``Target.of`` makes one of all that a user may give.

    Attributes:
        indices: classes ``[]`` (one for all images), ``[B]`` or ``[B, K]``; None where they are not known yet.
        score: a function of the model's output to one number an image, in the place of classes.
        places: ``[B, H, W]``, where in each image a score of a place looks, once views moved it.
        against: what the classes are set against: a class ``[]`` or ``[B]``, "rivals", "none" where they are meant by
            themselves, or None where nothing was said.
        weights: ``[B, K, classes]`` of the logits that are subtracted; None where there are none, or not yet.
    """

    indices: Tensor | None = None
    score: Score | None = None
    places: Tensor | None = None
    against: Tensor | Literal["rivals", "none"] | None = None
    weights: Tensor | None = None

    @classmethod
    def of(cls, wanted: TargetLike, batch: int, names: Sequence[str] | None = None) -> Target:
        """The target that is meant, if it fits the batch.

        Args:
            wanted: an index or name for all images, one an image, a row of them an image (lists, ranges, numpy arrays
                or tensors), a contrast, a function of the model's output to one score an image, or None for the
                predicted class.
            batch: how many images there are.
            names: of the model's classes, where they are known.
        """
        if wanted is None:
            return cls()
        if isinstance(wanted, Target):
            return wanted._fitting(batch)
        if isinstance(wanted, Contrast):
            return cls.of(wanted.target, batch, names)._against(wanted.against, batch, names)
        if callable(wanted) and not isinstance(wanted, Tensor):
            return cls(score=wanted)
        return cls(_indices(wanted, names))._fitting(batch)

    @property
    def several(self) -> bool:
        """Whether each image has a row of classes of its own: results then have a dimension for them."""
        return self.indices is not None and self.indices.ndim == 2

    @property
    def known(self) -> bool:
        """Whether nothing is left to be found out on the clean image."""
        weighed = not isinstance(self.opponent, str) or self.weights is not None
        return self.score is not None or (self.indices is not None and weighed)

    def resolve(self, logits: Tensor) -> Target:
        """The same with its classes known, ``[B]`` or ``[B, K]``, and what is subtracted; checked against the model."""
        if self.score is not None:
            return self
        found = self._classified(logits)
        if found.opponent is None or found.weights is not None:
            return found
        return replace(found, weights=found._weighed(logits))

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
        found = self.resolve(logits)
        return contrasted(logits, found.columns, found.weights).T  # [K, B]

    @property
    def columns(self) -> Tensor:
        """The classes of a resolved target, always ``[B, K]``."""
        if self.indices is None or self.indices.ndim == 0:
            raise TargetError("a score function has no class indices; give an int, a list or a tensor of indices")
        return self.indices.reshape(len(self.indices), -1)

    @property
    def opponent(self) -> Tensor | str | None:
        """What the classes are set against, if anything."""
        return None if isinstance(self.against, str) and self.against == "none" else self.against

    def for_each(self, batch: int, device: torch.device) -> Target:
        """The same said of each image of a batch, where it was said of all."""

        def spread(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device).expand(batch) if value.ndim == 0 else value.to(device)

        return replace(self, indices=spread(self.indices), against=spread(self.against))

    def part(self, start: int, stop: int) -> Target:
        """What is explained of some images of the batch."""
        return self._each(lambda tensor: tensor[start:stop])

    def select(self, images: Tensor) -> Target:
        """What is explained of the images of these numbers."""
        return self._each(lambda tensor: tensor[images.to(tensor.device)])

    def repeated(self, times: int) -> Target:
        """For that many copies of the batch, one after the other."""
        return self._each(lambda tensor: tensor.repeat(times, *[1] * (tensor.ndim - 1)))

    def singles(self) -> list[Target]:
        """One target for each of the K classes of an image."""
        if not self.several or self.indices is None:
            return [self]
        weights = [None] * self.indices.shape[1] if self.weights is None else self.weights.split(1, 1)
        pairs = zip(self.indices.unbind(1), weights, strict=True)
        return [replace(self, indices=column, weights=part) for column, part in pairs]

    def alone(self) -> Target:
        """The same classes by themselves, whatever they are set against."""
        return replace(self, against=None, weights=None)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Target:
        """The same with all that is said of each image changed; what is said of all images at once stays."""
        names = ("indices", "places", "against", "weights")
        values = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {
            name: change(value) for name, value in values.items() if isinstance(value, Tensor) and value.ndim > 0
        }
        return replace(self, **changed)

    def _fitting(self, batch: int) -> Target:
        indices = self.indices
        if indices is not None and indices.ndim > 0 and (indices.ndim > 2 or indices.shape[0] != batch):
            raise TargetError(
                f"target has shape {tuple(indices.shape)} for a batch of {batch}; give one index, [{batch}] indices, "
                f"or [{batch}, K] indices"
            )
        return self

    def _against(self, wanted: Any, batch: int, names: Sequence[str] | None) -> Target:
        if wanted is None or (isinstance(wanted, str) and wanted == "none"):
            return replace(self, against="none")
        if self.score is not None:
            raise TargetError("a score function stands for itself; subtract what it is set against inside of it")
        if isinstance(wanted, str) and wanted == "rivals":
            return replace(self, against="rivals")
        other = _indices(wanted, names)
        if other.ndim > 1 or (other.ndim == 1 and len(other) != batch):
            raise TargetError(f"against has shape {tuple(other.shape)} for a batch of {batch}; give one class an image")
        return replace(self, against=other)

    def _classified(self, logits: Tensor) -> Target:
        batch, classes = logits.shape
        if self.indices is None:
            return replace(self, indices=logits.detach().argmax(1))
        indices = self._fitting(batch).indices
        indices = indices.to(logits.device).expand(batch) if indices.ndim == 0 else indices.to(logits.device)  # type: ignore[union-attr]
        _check_range("target", indices, classes)
        return replace(self, indices=indices)

    def _weighed(self, logits: Tensor) -> Tensor:
        """The weight of each logit in what is subtracted: ``[B, K, classes]``."""
        own = self.columns.unsqueeze(2)  # [B, K, 1]
        if logits.shape[1] < 2:
            raise TargetError("the model has one output, so that nothing stands against it; leave against out")
        each = logits.detach().to(working_dtype(logits.dtype)).unsqueeze(1).expand(-1, own.shape[1], -1)
        if not isinstance(self.against, Tensor):
            return each.scatter(2, own, -torch.inf).softmax(2)
        other = self.against.to(logits.device).reshape(-1, 1, 1).expand_as(own)
        _check_range("against", other, logits.shape[1])
        if bool((other == own).any()):
            raise TargetError(f"class {int(other[other == own][0])} is set against itself; give another class")
        return torch.zeros_like(each).scatter(2, other, 1.0)


TargetLike: TypeAlias = (
    "int | str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[str]] | "
    "np.ndarray[Any, Any] | Tensor | Score | Contrast | Target | None"
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


def contrasted(logits: Tensor, columns: Tensor, weights: Tensor | None = None) -> Tensor:
    """The logits of classes ``[B, K]``, less the weighted sum of all logits where there are weights: ``[B, K]``."""
    columns = columns.clone() if columns.is_inference() else columns  # autograd keeps no tensors of inference mode
    if weights is None:
        return logits.gather(1, columns)
    wide = logits.to(working_dtype(logits.dtype))
    weights = (weights.clone() if weights.is_inference() else weights).to(wide)
    return wide.gather(1, columns) - (weights * wide.unsqueeze(1)).sum(2)


def names_of(model: nn.Module) -> Sequence[str] | None:
    """The names of a model's classes, where it has any."""
    names = getattr(model, "class_names", None)
    return names if isinstance(names, Sequence) and not isinstance(names, str) else None


def resolve_target(logits: Tensor, target: TargetLike) -> Tensor:
    """Class indices for a batch: ``[B]``, or ``[B, K]`` where several classes of each image are asked for."""
    resolved = Target.of(target, len(logits)).resolve(logits)
    return resolved.columns if resolved.several else resolved.columns[:, 0]


def _indices(wanted: Any, names: Sequence[str] | None) -> Tensor:
    try:
        indices = torch.as_tensor(_numbered(wanted, names))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TargetError(
            f"target is of type {type(wanted).__name__}; give class indices as integers, names of classes, or a "
            "function of the output"
        ) from error
    if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
        raise TargetError(f"target has type {indices.dtype}; give class indices as integers")
    return indices.long()


def _numbered(wanted: Any, names: Sequence[str] | None) -> Any:
    """The same nesting with an index for every name."""
    if isinstance(wanted, str):
        if names is None:
            raise TargetError(f"target {wanted!r} is a name, and this model has no class_names; give a class index")
        return find_class(wanted, names)
    if getattr(getattr(wanted, "dtype", None), "kind", "") in ("U", "O"):  # a numpy array of names
        wanted = wanted.tolist()
    if isinstance(wanted, Sequence) and not isinstance(wanted, bytes):
        return [_numbered(each, names) for each in wanted]
    return wanted


def _check_range(name: str, indices: Tensor, classes: int) -> None:
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= classes:
        raise TargetError(
            f"{name} {low if low < 0 else high} is out of range; the model has classes 0 to {classes - 1}"
        )
