"""Scores of a model's output, one number an image: targets for models that are no classifiers.

Each is a target of every method, as any function of your own is. It looks at the output as the model returns it: a
tensor, transformers' output object, or a dict. It is part of what is explained: a norm that it divides by is held, as
one inside the model would be.

Example:
    >>> create_method("dave", detector).attribute(image, scores.Detection(17, box=(0.1, 0.2, 0.5, 0.9)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.errors import OptionError, OutputError, TargetError

Box = tuple[float, float, float, float]
"""(x0, y0, x1, y1), as fractions of the image's width and height."""
Find = Callable[[Any], Tensor]

_LOGITS = ("logits", "class_queries_logits", "out")
_EMBEDDINGS = ("image_embeds", "pooler_output", "embeddings", "last_hidden_state")
_VALUES = ("predicted_depth", "logits", "reconstruction")
_MASKS = ("logits", "out", "pred_masks", "predicted_depth")


def found(output: Any, names: Sequence[str], what: str) -> Tensor:
    """The output itself where it is a tensor, else the first tensor that it holds under one of some names."""
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


@dataclass(frozen=True)
class ClassLogit:
    """The logit of one class.

    Attributes:
        label: index of the class.
    """

    label: int

    def __call__(self, output: Any) -> Tensor:
        """Of logits ``[B, classes]``: ``[B]``."""
        logits = _of_rank(found(output, _LOGITS, "logits"), 2, "[B, classes]")
        return _pick(logits, 1, self.label, "class")


@dataclass(frozen=True)
class Value:
    """A number that the model estimates, or the mean of a map of them.

    Attributes:
        index: which one, where there are several a picture ``[B, N]``.
    """

    index: int = 0

    def __call__(self, output: Any) -> Tensor:
        """Of values ``[B]`` or ``[B, N]``, or of a map ``[B, ..., h, w]``, which is averaged: ``[B]``."""
        values = found(output, _VALUES, "values")
        if values.ndim > 2:
            return values.flatten(1).mean(1)
        return values if values.ndim == 1 else _pick(values, 1, self.index, "value")


@dataclass(frozen=True, eq=False)
class Similarity:
    """Cosine of the picture's embedding with a given one.

    Attributes:
        embedding: ``[D]``.
        find: from the output to embeddings ``[B, D]``; by default those that transformers returns, tokens averaged.
    """

    embedding: Tensor
    find: Find | None = None

    def __call__(self, output: Any) -> Tensor:
        """``[B]``, from -1 to 1."""
        own = embeddings(output, self.find)
        other = self.embedding.to(own).flatten()
        if own.shape[-1] != len(other):
            raise TargetError(f"an embedding of {len(other)} numbers; the model makes {own.shape[-1]} of a picture")
        return F.normalize(own, dim=-1) @ F.normalize(other, dim=0)

    @classmethod
    def to_image(cls, model: nn.Module, image: Tensor, find: Find | None = None) -> Similarity:
        """With the embedding that the model makes of another picture ``[1, C, H, W]``, preprocessed."""
        with torch.no_grad():
            return cls(embeddings(model(image), find)[0], find)


def embeddings(output: Any, find: Find | None = None) -> Tensor:
    """The embedding of each picture, ``[B, D]``; of tokens ``[B, N, D]`` it is the mean."""
    own = find(output) if find is not None else found(output, _EMBEDDINGS, "embeddings")
    return own if own.ndim == 2 else own.flatten(1, -2).mean(1)


@dataclass(frozen=True)
class Token:
    """The logit of a word of a language model's vocabulary.

    Attributes:
        token: its number.
        position: where in the sequence it is predicted; -1 is after the last token.
    """

    token: int
    position: int = -1

    def __call__(self, output: Any) -> Tensor:
        """Of logits ``[B, L, vocabulary]``: ``[B]``."""
        logits = _of_rank(found(output, _LOGITS, "logits"), 3, "[B, length, vocabulary]")
        return _pick(_pick(logits, 1, self.position, "position"), 1, self.token, "token")


@dataclass(frozen=True)
class Word:
    """The logits of the tokens that a word is made of, added up.

    Attributes:
        tokens: their numbers.
        positions: where in the sequence each is predicted; -1 is after the last token.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]

    def __call__(self, output: Any) -> Tensor:
        """Of logits ``[B, L, vocabulary]``: ``[B]``."""
        pieces = [Token(*piece)(output) for piece in zip(self.tokens, self.positions, strict=True)]
        return torch.stack(pieces).sum(0)


@dataclass(frozen=True)
class Query:
    """The class logit of one query of a detector.

    Queries look at places of the image: where views move the image, ``Detection`` follows an object and this does not.

    Attributes:
        query: its number.
        label: index of the class.
    """

    query: int
    label: int

    def __call__(self, output: Any) -> Tensor:
        """Of logits ``[B, queries, classes]``: ``[B]``."""
        logits = _of_rank(found(output, _LOGITS, "logits"), 3, "[B, queries, classes]")
        return _pick(_pick(logits, 1, self.query, "query"), 1, self.label, "class")


@dataclass(frozen=True, eq=False)
class Detection:
    """The class logit of whichever query's box lies best on a given one; the given one moves with the views.

    Attributes:
        label: index of the class.
        box: where the object is.
    """

    label: int
    box: Box

    def __post_init__(self) -> None:
        _check_box(self.box)

    def place(self, size: tuple[int, int]) -> Tensor:
        """The box as a mask ``[H, W]``."""
        return box_mask(self.box, size)

    def __call__(self, output: Any, places: Tensor | None = None) -> Tensor:
        """Of logits ``[B, queries, classes]`` and boxes ``[B, queries, 4]`` (centre, width and height): ``[B]``."""
        logits = _of_rank(found(output, _LOGITS, "logits"), 3, "[B, queries, classes]")
        boxes = found(output, ("pred_boxes",), "boxes").detach()
        wanted = boxes.new_tensor(self.box).expand(len(boxes), 4) if places is None else _bounds(places).to(boxes)
        best = _overlap(boxes, wanted).argmax(1)  # [B]
        column = _pick(logits, 2, self.label, "class")  # [B, queries]
        return column.gather(1, best[:, None])[:, 0]


@dataclass(frozen=True, eq=False)
class Region:
    """The mean logit of a class within a part of the image; the part moves with the views.

    Attributes:
        label: index of the class; of maps without classes ``[B, h, w]`` it must be 0.
        box: where, or
        mask: ``[h, w]`` from 0 to 1, of any size.
    """

    label: int
    box: Box | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.box is None) == (self.mask is None):
            raise OptionError("a region is a box or a mask; give one of them")
        if self.box is not None:
            _check_box(self.box)

    def place(self, size: tuple[int, int]) -> Tensor:
        """As a mask ``[H, W]``."""
        if self.box is not None:
            return box_mask(self.box, size)
        given: Tensor = self.mask  # type: ignore[assignment]
        return F.interpolate(given.detach().double()[None, None], size, mode="area")[0, 0]

    def __call__(self, output: Any, places: Tensor | None = None) -> Tensor:
        """Of logits ``[B, classes, h, w]``, or of a map ``[B, h, w]``: ``[B]``."""
        maps = found(output, _MASKS, "a map of logits")
        maps = _pick(maps, 1, self.label, "class") if maps.ndim > 3 else maps  # [B, ..., h, w]
        maps = maps.flatten(1, -3).mean(1) if maps.ndim > 3 else maps
        size = (maps.shape[-2], maps.shape[-1])
        weight = self.place(size)[None] if places is None else F.interpolate(places[None], size, mode="area")[0]
        weight = weight.to(maps)  # [B or 1, h, w]
        total = weight.sum((1, 2), keepdim=True)
        return (maps * (weight / torch.where(total > 0, total, 1))).sum((1, 2))


def box_mask(box: Box, size: tuple[int, int]) -> Tensor:
    """How much of each pixel lies within a box: ``[H, W]``, from 0 to 1."""
    columns, rows = (_covered(box[axis], box[axis + 2], size[1 - axis]) for axis in (0, 1))
    return rows[:, None] * columns


def _covered(low: float, high: float, extent: int) -> Tensor:
    edges = torch.arange(extent + 1, dtype=torch.float64)
    inside = edges.clamp(low * extent, high * extent)
    return inside[1:] - inside[:-1]


def _check_box(box: Box) -> None:
    if len(box) != 4 or not (0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1):
        raise OptionError(f"box {tuple(box)}; expected (x0, y0, x1, y1) as fractions of the image, x0 < x1 and y0 < y1")


def _bounds(places: Tensor) -> Tensor:
    """Corners of what masks ``[B, H, W]`` cover, as fractions: ``[B, 4]``; the whole image where they are empty."""
    corners = []
    for axis in (1, 2):  # what is left is the profile along x, then along y
        inside = places.amax(axis) > 0.5  # [B, extent]
        inside = inside | ~inside.any(1, keepdim=True)
        extent = inside.shape[1]
        at = torch.arange(extent, device=places.device)
        low = torch.where(inside, at, extent).amin(1)
        high = torch.where(inside, at, -1).amax(1) + 1
        corners.append((low / extent, high / extent))
    (x0, x1), (y0, y1) = corners
    return torch.stack([x0, y0, x1, y1], 1)


def _overlap(boxes: Tensor, wanted: Tensor) -> Tensor:
    """Intersection over union of boxes ``[B, N, 4]`` (centre and size) with corners ``[B, 4]``: ``[B, N]``."""
    centre, size = boxes[..., :2], boxes[..., 2:].clamp(min=0)
    low, high = centre - size / 2, centre + size / 2
    start, stop = wanted[:, None, :2], wanted[:, None, 2:]
    common = (torch.minimum(high, stop) - torch.maximum(low, start)).clamp(min=0).prod(-1)
    union = size.prod(-1) + (stop - start).prod(-1) - common
    return common / union.clamp(min=torch.finfo(union.dtype).tiny)


def _of_rank(tensor: Tensor, rank: int, shape: str) -> Tensor:
    if tensor.ndim != rank:
        raise OutputError(f"the model returned shape {tuple(tensor.shape)}; this score needs {shape}: choose another")
    return tensor


def _pick(tensor: Tensor, axis: int, index: int, what: str) -> Tensor:
    extent = tensor.shape[axis]
    if not -extent <= index < extent:
        raise TargetError(f"{what} {index} is out of range; the model has {extent}, 0 to {extent - 1}")
    return tensor.select(axis, index)
