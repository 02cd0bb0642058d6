"""Scores of a model's output, one number per image: targets for models that are no classifiers.

Each is a target of every method, as any function of your own is. It looks at the output as the model returns it: a
tensor, transformers' output object, or a dict. It is part of what is explained: a norm that it divides by is frozen,
as one inside the model would be.

Example:
    >>> create_method("dave", detector).attribute(image, scores.Detection(17, box=(0.1, 0.2, 0.5, 0.9)))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.engine.score_registry import SCORES, Box, ScoreContext, box_mask, box_overlap, check_box, mask_bounds
from dave_vit.engine.targets import LOGITS, find_logits, find_tensor
from dave_vit.errors import OptionError, TargetError

Find = Callable[[Any], Tensor]

_EMBEDDINGS = ("image_embeds", "pooler_output", "embeddings", "last_hidden_state")
_VALUES = ("predicted_depth", "logits", "reconstruction")
_MASKS = ("pred_masks", "masks_queries_logits", "logits", "out", "predicted_depth")


def parse_score(text: str, model: Any, geometry: Any) -> Callable[..., Tensor]:
    """Parse a score such as "query:3:CLASS".

    Args:
        text: name of the score, then what its form says.
        model: gives class names, embeddings and tokens.
        geometry: of the photograph that is explained.
    """
    name, _, rest = text.partition(":")
    if name not in SCORES:
        raise OptionError(f"score {text!r}; expected one of {', '.join(score_forms())}")
    try:
        return SCORES[name].parse(rest, ScoreContext(model, geometry))  # type: ignore[no-any-return]
    except ValueError as error:
        raise OptionError(f"score {text!r}; expected {SCORES[name].form}") from error


def score_forms() -> dict[str, str]:
    """Return the summary of all named scores by their forms, for help texts."""
    return {SCORES[name].form: summary for name, summary in SCORES.summaries().items()}


@SCORES.register("class")
@dataclass(frozen=True)
class ClassLogit:
    """The logit of one class.

    Attributes:
        label: index of the class.
    """

    form: ClassVar[str] = "class:CLASS"

    label: int

    @classmethod
    def parse(cls, text: str, context: ScoreContext) -> ClassLogit:
        """Parse the class."""
        return cls(context.class_index(text))

    def __call__(self, output: Any) -> Tensor:
        """Select the logit ``[B]`` from logits ``[B, classes]``."""
        return _pick(find_logits(output, "[B, classes]"), 1, self.label, "class")


@SCORES.register("value")
@dataclass(frozen=True)
class Value:
    """A number that the model estimates, or the mean of a map of them.

    Attributes:
        index: which one, where there are several a picture ``[B, N]``.
    """

    form: ClassVar[str] = "value or value:INDEX"

    index: int = 0

    @classmethod
    def parse(cls, text: str, context: ScoreContext) -> Value:
        """Parse the index."""
        return cls(int(text or 0))

    def __call__(self, output: Any) -> Tensor:
        """Return values ``[B]``, select from ``[B, N]``, or average a map ``[B, ..., h, w]``: ``[B]``."""
        values = find_tensor(output, _VALUES, "values")
        if values.ndim > 2:
            return values.flatten(1).mean(1)
        return values if values.ndim == 1 else _pick(values, 1, self.index, "value")


@SCORES.register("similarity")
@dataclass(frozen=True, eq=False)
class Similarity:
    """Cosine of the picture's embedding with a given one.

    Attributes:
        embedding: ``[D]``.
        find: from the output to embeddings ``[B, D]``; by default those that transformers returns, tokens averaged.
    """

    form: ClassVar[str] = "similarity:FILE"

    embedding: Tensor
    find: Find | None = None

    @classmethod
    def parse(cls, text: str, context: ScoreContext) -> Similarity:
        """Parse the path of another image."""
        if not text:
            raise ValueError
        return cls.to_image(context.model, context.model.preprocess(text))

    def __call__(self, output: Any) -> Tensor:
        """Compute the cosines ``[B]``, from -1 to 1."""
        own = select_embeddings(output, self.find)
        other = self.embedding.to(own).flatten()
        if own.shape[-1] != len(other):
            raise TargetError(f"an embedding of {len(other)} numbers; the model returns {own.shape[-1]} per picture")
        return F.normalize(own, dim=-1) @ F.normalize(other, dim=0)

    @classmethod
    def to_image(cls, model: nn.Module, image: Tensor, find: Find | None = None) -> Similarity:
        """Return the similarity to another preprocessed picture ``[1, C, H, W]``, embedded by the model."""
        with torch.no_grad():
            return cls(select_embeddings(model(image), find)[0], find)


def select_embeddings(output: Any, find: Find | None = None) -> Tensor:
    """Return the embedding of each picture, ``[B, D]``; tokens ``[B, N, D]`` are averaged."""
    own = find(output) if find is not None else find_tensor(output, _EMBEDDINGS, "embeddings")
    return own if own.ndim == 2 else own.flatten(1, -2).mean(1)


@SCORES.register("token")
@dataclass(frozen=True)
class Token:
    """The logit of a word of a language model's vocabulary.

    Attributes:
        token: its number.
        position: where in the sequence it is predicted; -1 is after the last token.
    """

    form: ClassVar[str] = "token:WORD"

    token: int
    position: int = -1

    @classmethod
    def parse(cls, text: str, context: ScoreContext) -> Token:
        """Parse a word that is one token of the model."""
        tokenizer, spec = getattr(context.model, "tokenizer", None), context.model.spec
        if tokenizer is None:
            raise OptionError(f"{spec} has no words; a score of a token is for models that write text")
        if not text:
            raise ValueError
        for word in (f" {text}", text):  # most vocabularies hold words with the space before them
            tokens = tokenizer(word, add_special_tokens=False)["input_ids"]
            if len(tokens) == 1 and tokens[0] != getattr(tokenizer, "unk_token_id", None):
                return cls(int(tokens[0]))
        raise OptionError(f"{text!r} is not one token of {spec} but {len(tokens)}, or unknown; give another word")

    def __call__(self, output: Any) -> Tensor:
        """Select the logit ``[B]`` from logits ``[B, L, vocabulary]``."""
        logits = find_logits(output, "[B, length, vocabulary]")
        return _pick(_pick(logits, 1, self.position, "position"), 1, self.token, "token")


@dataclass(frozen=True, eq=False)
class Word:
    """The logits of the tokens that a word is made of, added up; by themselves, or against their rivals.

    Attributes:
        tokens: their numbers.
        positions: where in the sequence each is predicted; -1 is after the last token.
        rivals: weights ``[tokens, vocabulary]`` of the logits that are subtracted from each; see `against_rivals`.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    rivals: Tensor | None = None

    @property
    def computation(self) -> tuple[Any, ...]:
        """What is computed, whatever the word: words of which this is equal share the checks of a model."""
        return type(self), len(self.tokens), self.rivals is None

    def __call__(self, output: Any) -> Tensor:
        """Sum the logits of the tokens, from logits ``[B, L, vocabulary]``: ``[B]``."""
        pieces = [Token(*piece)(output) for piece in zip(self.tokens, self.positions, strict=True)]
        total = torch.stack(pieces).sum(0)
        if self.rivals is None:
            return total
        logits = find_tensor(output, LOGITS, "logits")[:, list(self.positions)]  # [B, tokens, vocabulary]
        return total - (logits * self.rivals.to(logits)).sum((1, 2))

    def against_rivals(self, output: Any) -> Word:
        """Return the word against all others: minus their logits, weighted by their softmax in the output of one image.

        The weights are computed once, on the clean image, and kept fixed, as those of ``Contrast``.
        """
        logits = find_tensor(output, LOGITS, "logits")[0, list(self.positions)].detach()  # [tokens, vocabulary]
        own = torch.tensor(self.tokens, device=logits.device)[:, None]
        return replace(self, rivals=logits.scatter(1, own, -torch.inf).softmax(1))


@SCORES.register("query")
@dataclass(frozen=True)
class Query:
    """The class logit of one query of a detector.

    Queries look at places of the image: where views move the image, ``Detection`` follows an object and this does not.

    Attributes:
        query: its number.
        label: index of the class.
    """

    form: ClassVar[str] = "query:NUMBER:CLASS"

    query: int
    label: int

    @classmethod
    def parse(cls, text: str, context: ScoreContext) -> Query:
        """Parse number and class."""
        number, label = text.split(":", 1)
        return cls(int(number), context.class_index(label))

    def __call__(self, output: Any) -> Tensor:
        """Select the logit ``[B]`` from logits ``[B, queries, classes]``."""
        logits = find_logits(output, "[B, queries, classes]")
        return _pick(_pick(logits, 1, self.query, "query"), 1, self.label, "class")


@SCORES.register("box")
@dataclass(frozen=True, eq=False)
class Detection:
    """The class logit of whichever query's box lies best on a given one; the given one moves with the views.

    Attributes:
        label: index of the class.
        box: where the object is.
    """

    form: ClassVar[str] = "box:x0,y0,x1,y1:CLASS"

    label: int
    box: Box

    def __post_init__(self) -> None:
        check_box(self.box)

    def place(self, size: tuple[int, int]) -> Tensor:
        """Return the box as a mask ``[H, W]``."""
        return box_mask(self.box, size)

    @classmethod
    def parse(cls, text: str, context: ScoreContext) -> Detection:
        """Parse box and class."""
        corners, label = text.split(":", 1)
        return cls(context.class_index(label), context.box(corners))

    def __call__(self, output: Any, places: Tensor | None = None) -> Tensor:
        """Select ``[B]`` from logits ``[B, queries, classes]`` by boxes ``[B, queries, 4]`` (centre, width, height)."""
        logits = find_logits(output, "[B, queries, classes]")
        boxes = find_tensor(output, ("pred_boxes",), "boxes").detach()
        corners = boxes.new_tensor(self.box).expand(len(boxes), 4) if places is None else mask_bounds(places).to(boxes)
        best = box_overlap(boxes, corners).argmax(1)  # [B]
        column = _pick(logits, 2, self.label, "class")  # [B, queries]
        return column.gather(1, best[:, None])[:, 0]


@SCORES.register("region")
@dataclass(frozen=True, eq=False)
class Region:
    """The mean logit of a class within a part of the image; the part moves with the views.

    Attributes:
        label: index of the class, or of the query where each has a mask; of maps ``[B, h, w]`` it must be 0.
        box: where, or
        mask: ``[h, w]`` from 0 to 1, of any size.
    """

    form: ClassVar[str] = "region:x0,y0,x1,y1:CLASS"

    label: int
    box: Box | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.box is None) == (self.mask is None):
            raise OptionError("a region is a box or a mask; give one of them")
        if self.box is not None:
            check_box(self.box)

    def place(self, size: tuple[int, int]) -> Tensor:
        """Return the region as a mask ``[H, W]``."""
        if self.box is not None:
            return box_mask(self.box, size)
        mask: Tensor = self.mask  # type: ignore[assignment]
        return F.interpolate(mask.detach().cpu().double()[None, None], size, mode="area")[0, 0]

    @classmethod
    def parse(cls, text: str, context: ScoreContext) -> Region:
        """Parse box and class."""
        corners, _, label = text.partition(":")
        return cls(context.class_index(label) if label else 0, box=context.box(corners))

    def __call__(self, output: Any, places: Tensor | None = None) -> Tensor:
        """Average logits ``[B, classes, h, w]``, or a map ``[B, h, w]``, over the region: ``[B]``."""
        maps = find_tensor(output, _MASKS, "a map of logits")
        maps = _pick(maps, 1, self.label, "class") if maps.ndim > 3 else maps  # [B, ..., h, w]
        maps = maps.flatten(1, -3).mean(1) if maps.ndim > 3 else maps
        size = (maps.shape[-2], maps.shape[-1])
        weight = self.place(size)[None] if places is None else F.interpolate(places[None], size, mode="area")[0]
        weight = weight.to(maps)  # [B or 1, h, w]
        total = weight.sum((1, 2), keepdim=True)
        return (maps * (weight / torch.where(total > 0, total, 1))).sum((1, 2))


def _pick(tensor: Tensor, axis: int, index: int, what: str) -> Tensor:
    extent = tensor.shape[axis]
    if not -extent <= index < extent:
        raise TargetError(f"{what} {index} is out of range; the model has {extent}, 0 to {extent - 1}")
    return tensor.select(axis, index)
