"""What is explained, in one normalised form: classes, contrasts between classes, or any score of the output."""

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
"""From a model's output, as the model returns it, to one number per image ``[B]``."""
Opponents: TypeAlias = "tuple[int | Literal['rivals'] | None, ...]"
"""What each image's classes are contrasted with: a class index, "rivals", or None for the class by itself."""
LOGITS = ("logits", "class_queries_logits", "out")
"""Names under which outputs hold logits."""


@dataclass(frozen=True)
class ScoreSet:
    """Several scores of one output: a target that takes one forward pass, with one map for each.

    Attributes:
        parts: functions of the model's output to one number per image ``[B]``.
    """

    parts: tuple[Score, ...]

    def __call__(self, output: Any) -> Tensor:
        """Compute all scores, ``[B, K]``."""
        return torch.stack([part(output) for part in self.parts], 1)

    @property
    def computation(self) -> tuple[Any, ...] | None:
        """The computations of all parts; None if one of them is not known."""
        parts = tuple(getattr(part, "computation", None) for part in self.parts)
        return None if None in parts else parts


@dataclass(frozen=True)
class Contrast:
    """A class against others: why this and not that? A target of every method.

    Against its rivals means the logit minus the average of all other logits, weighted by their softmax. The weights are
    computed once, on the clean image, and kept fixed.

    Args:
        target: as every target, but no score function.
        against: the index or name of one class, or of one class per image; "rivals"; None for the class by itself, also
            in methods that contrast it with its rivals by default.

    Example:
        >>> DAVE(model).attribute(images, Contrast("beer glass", against="red wine"))
    """

    target: TargetLike = None
    against: int | str | Sequence[int] | Sequence[str] | Tensor | None = None


@dataclass(frozen=True, eq=False)
class Target:
    """What is explained of each image of a batch, normalised; ``Target.of`` converts everything that a user may give.

    There are always K numbers per image; K = 1 for one score, and for classes that were given without a K axis.

    Attributes:
        indices: classes ``[B, K]``; None for a score, and for the predicted class as long as it is not resolved.
        score: a function of the model's output to one number per image, or a ``ScoreSet``, instead of classes.
        places: ``[B, H, W]``, where in each image a score of a place looks, once views moved it.
        against: one entry per image; None where the caller left it open.
        weights: ``[B, K, classes]`` of the logits that are subtracted; None without a contrast, or if not yet resolved.
        has_class_axis: whether the caller gave classes ``[B, K]`` or a ``ScoreSet``: only then do public results have
            the K axis.
        classes: how many classes the model has of which the indices are known to be; None if they were not checked.
    """

    indices: Tensor | None = None
    score: Score | None = None
    places: Tensor | None = None
    against: Opponents | None = None
    weights: Tensor | None = None
    has_class_axis: bool = False
    classes: int | None = None

    @classmethod
    def of(cls, target: TargetLike, batch: int, names: Sequence[str] | None = None) -> Target:
        """Normalise a target for a batch; a ``Target`` is returned as it is.

        Args:
            target: an index or name for all images, one per image, a row of them per image (lists, ranges, numpy arrays
                or tensors), a contrast, a function of the model's output to one score per image, or None for the
                predicted class.
            batch: number of images.
            names: of the model's classes, where they are known.
        """
        if isinstance(target, Target):
            return target
        if target is None:
            return cls()
        if isinstance(target, Contrast):
            chosen = cls.of(target.target, batch, names)
            return replace(chosen, against=_parse_opponents(target.against, chosen, batch, names))
        if callable(target) and not isinstance(target, Tensor):
            return cls(score=target, has_class_axis=isinstance(target, ScoreSet))
        indices = _parse_indices(target, names)
        if indices.ndim > 0 and (indices.ndim > 2 or indices.shape[0] != batch):
            raise TargetError(
                f"target has shape {tuple(indices.shape)} for a batch of {batch}; give one index, [{batch}] indices, "
                f"or [{batch}, K] indices"
            )
        return cls(indices, has_class_axis=True) if indices.ndim == 2 else cls(indices.expand(batch).unsqueeze(1))

    @property
    def count(self) -> int:
        """K, how many numbers of each image are explained."""
        if self.indices is None:
            return len(self.score.parts) if isinstance(self.score, ScoreSet) else 1
        return self.indices.shape[1]

    @property
    def has_contrast(self) -> bool:
        """Whether something is subtracted from the logits of any image."""
        return self.against is not None and any(opponent is not None for opponent in self.against)

    @property
    def is_resolved(self) -> bool:
        """Whether no logits of the clean image are needed to know the classes and the weights of a contrast."""
        needs_weights = self.against is not None and "rivals" in self.against and self.weights is None
        return self.score is not None or (self.indices is not None and not needs_weights)

    def resolve(self, logits: Tensor) -> Target:
        """Fill in the predicted classes and the weights of a contrast from logits ``[B, classes]``, and check both."""
        if self.score is not None:
            return self
        indices = logits.detach().argmax(1, keepdim=True) if self.indices is None else self.indices.to(logits.device)
        if self.indices is not None and self.classes != logits.shape[1]:  # once: the host waits for the device
            _check_range("target", indices, logits.shape[1])
        resolved = replace(self, indices=indices, classes=logits.shape[1])
        if self.weights is not None or not self.has_contrast:
            return resolved
        return replace(resolved, weights=resolved._contrast_weights(logits, indices))

    def read(self, output: Any, batch: int) -> Tensor:
        """Select what is explained from the output: logits ``[B, classes]``, or values of the scores ``[B, K]``."""
        if self.score is None:
            return class_logits(output, batch)
        score = self.score(output) if self.places is None else self.score(output, self.places)
        shape = tuple(score.shape) if isinstance(score, Tensor) else None
        if shape != ((batch, self.count) if isinstance(self.score, ScoreSet) else (batch,)):
            what = type(score).__name__ if shape is None else f"shape {shape}"
            raise TargetError(f"the score function returned {what}; it must return one number per image, [{batch}]")
        return score if score.ndim == 2 else score.unsqueeze(1)

    def scores(self, logits: Tensor) -> Tensor:
        """Compute the explained numbers ``[B, K]`` from what ``read`` returned."""
        if self.score is not None:
            return logits
        resolved = self.resolve(logits)
        return contrast_scores(logits, resolved.class_indices, resolved.weights)

    @property
    def class_indices(self) -> Tensor:
        """The classes ``[B, K]`` of a resolved target."""
        if self.indices is None:
            raise TargetError("a score function has no class indices; give an int, a list or a tensor of indices")
        return self.indices

    def to(self, device: torch.device) -> Target:
        """Move all tensors to a device."""
        return self._map(lambda tensor: tensor.to(device), tuple)

    def part(self, start: int, stop: int) -> Target:
        """Select the images ``start`` to ``stop``."""
        return self._map(lambda tensor: tensor[start:stop], lambda against: against[start:stop])

    def select(self, images: Tensor) -> Target:
        """Select images by index."""
        return self._map(
            lambda tensor: tensor[images.to(tensor.device)], lambda against: tuple(against[i] for i in images.tolist())
        )

    def repeat(self, times: int) -> Target:
        """Repeat for so many copies of the batch, one after the other."""
        return self._map(lambda tensor: tensor.repeat(times, *[1] * (tensor.ndim - 1)), lambda against: against * times)

    def split_classes(self) -> list[Target]:
        """Return one target with K = 1 for each of the K classes or scores."""
        if isinstance(self.score, ScoreSet):
            return [replace(self, score=ScoreSet((part,))) for part in self.score.parts]
        if self.indices is None:
            return [self]
        weights = [None] * self.count if self.weights is None else self.weights.split(1, 1)
        pairs = zip(self.indices.split(1, 1), weights, strict=True)
        return [replace(self, indices=column, weights=part) for column, part in pairs]

    def without_contrast(self) -> Target:
        """Return the same classes by themselves."""
        return replace(self, against=None, weights=None)

    def _map(self, change: Callable[[Tensor], Tensor], change_against: Callable[[Opponents], Opponents]) -> Target:
        """Return a copy with the per-image tensors and opponents changed."""
        changed: Any = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed, against=self.against and change_against(self.against))

    def _contrast_weights(self, logits: Tensor, indices: Tensor) -> Tensor:
        """Compute the weight of each logit in what is subtracted: ``[B, K, classes]``."""
        if logits.shape[1] < 2:
            raise TargetError("the model has one output, so there is no other class; leave against out")
        own, against = indices.unsqueeze(2), self.against or ()  # [B, K, 1]
        each = logits.detach().to(working_dtype(logits.dtype)).unsqueeze(1).expand(-1, own.shape[1], -1)
        if not any(isinstance(opponent, int) for opponent in against):
            weights = each.scatter(2, own, -torch.inf).softmax(2)
            if None not in against:
                return weights
            is_contrasted = torch.tensor([opponent is not None for opponent in against], device=logits.device)
            return weights * is_contrasted[:, None, None]
        other = torch.tensor(against, device=logits.device).reshape(-1, 1, 1).expand_as(own)
        _check_range("against", other, logits.shape[1])
        if bool((other == own).any()):
            raise TargetError(f"target and against are both class {int(other[other == own][0])}; give two classes")
        return torch.zeros_like(each).scatter(2, other, 1.0)


TargetLike: TypeAlias = (
    "int | str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[str]] | "
    "np.ndarray[Any, Any] | Tensor | Score | Contrast | Target | None"
)
"""All that may be given as a target; see ``Target.of``."""


def class_logits(output: Any, batch: int) -> Tensor:
    """Return the logits ``[B, classes]`` of a classifier's output: a tensor, or an object with attribute ``logits``."""
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


def find_tensor(output: Any, names: Sequence[str], what: str) -> Tensor:
    """Return the output itself if it is a tensor, else the first tensor under one of the names."""
    if isinstance(output, Tensor):
        return output
    for name in names:
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    raise OutputError(
        f"the model returned {type(output).__name__} without {what} ({', '.join(names)}); write the score as a "
        "function of its output, such as lambda out: out.values[:, 0]"
    )


def find_logits(output: Any, shape: str) -> Tensor:
    """Return the logits of an output if they have as many axes as a shape such as "[B, classes]"."""
    logits = find_tensor(output, LOGITS, "logits")
    if logits.ndim != shape.count(",") + 1:
        raise OutputError(f"the model returned shape {tuple(logits.shape)}; this score needs {shape}: choose another")
    return logits


def contrast_scores(logits: Tensor, indices: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the logits of classes ``[B, K]``, minus the weighted sum of all logits if there are weights."""
    indices = indices.clone() if indices.is_inference() else indices  # autograd keeps no tensors of inference mode
    if weights is None:
        return logits.gather(1, indices)
    wide = logits.to(working_dtype(logits.dtype))
    weights = (weights.clone() if weights.is_inference() else weights).to(wide)
    return wide.gather(1, indices) - (weights * wide.unsqueeze(1)).sum(2)


def class_names(model: nn.Module) -> Sequence[str] | None:
    """Return the names of a model's classes, also those that a transformers model has in its config, or None."""
    labels = getattr(getattr(model, "config", None), "id2label", None)  # {0: "tabby", ...}
    known = [labels[index] for index in sorted(labels)] if isinstance(labels, dict) else None
    names = getattr(model, "class_names", known)
    return names if isinstance(names, Sequence) and not isinstance(names, str) else None


def _parse_indices(target: Any, names: Sequence[str] | None) -> Tensor:
    try:
        indices = torch.as_tensor(_replace_names(target, names))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TargetError(
            f"target is of type {type(target).__name__}; give class indices as integers, names of classes, or a "
            "function of the output"
        ) from error
    if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
        raise TargetError(f"target has type {indices.dtype}; give class indices as integers")
    return indices.long()


def _replace_names(target: Any, names: Sequence[str] | None) -> Any:
    """Replace every class name by its index, keeping the nesting."""
    if isinstance(target, str):
        if names is None:
            raise TargetError(f"target {target!r} is a name, and this model has no class_names; give a class index")
        return find_class(target, names)
    if getattr(getattr(target, "dtype", None), "kind", "") in ("U", "O"):  # a numpy array of names
        target = target.tolist()
    if isinstance(target, Sequence) and not isinstance(target, bytes):
        return [_replace_names(each, names) for each in target]
    return target


def _parse_opponents(against: Any, target: Target, batch: int, names: Sequence[str] | None) -> Opponents:
    if against is None or (isinstance(against, str) and against == "none"):
        return (None,) * batch
    if target.score is not None:
        raise TargetError("against does not apply to a score function; subtract the other score inside the function")
    if isinstance(against, str) and against == "rivals":
        return tuple("rivals" for _ in range(batch))
    indices = _parse_indices(against, names)
    if indices.ndim > 1 or (indices.ndim == 1 and len(indices) != batch):
        raise TargetError(f"against has shape {tuple(indices.shape)} for a batch of {batch}; give one class per image")
    return tuple(indices.expand(batch).tolist())


def _check_range(name: str, indices: Tensor, classes: int) -> None:
    low, top = torch.stack(indices.aminmax()).tolist()
    if low < 0 or top >= classes:
        raise TargetError(f"{name} {low if low < 0 else top} is out of range; the model has classes 0 to {classes - 1}")
