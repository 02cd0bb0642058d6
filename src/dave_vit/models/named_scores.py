"""Scores by their names, as on the command line: ``query:3:CLASS``, ``region:x0,y0,x1,y1:CLASS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dave_vit.data.geometry import Geometry
from dave_vit.engine.scores import Box, ClassLogit, Detection, Query, Region, Similarity, Token, Value
from dave_vit.engine.targets import Score
from dave_vit.errors import OptionError
from dave_vit.models.adapter import Adapter

SCORE_FORMS = {
    "class": "class:CLASS",
    "value": "value or value:INDEX",
    "query": "query:NUMBER:CLASS",
    "box": "box:x0,y0,x1,y1:CLASS",
    "region": "region:x0,y0,x1,y1:CLASS",
    "similarity": "similarity:FILE",
    "token": "token:WORD",
}
"""Name of each score, and how it is written; boxes are in pixels of the photograph."""


def parse_score(text: str, model: Adapter, geometry: Geometry) -> Score:
    """The score that is meant.

    Args:
        text: in one of ``SCORE_FORMS``.
        model: gives class names, embeddings and words.
        geometry: of the photograph that is explained.
    """
    name, _, rest = text.partition(":")
    if name not in SCORE_FORMS:
        raise OptionError(f"score {text!r}; expected one of {', '.join(SCORE_FORMS.values())}")
    try:
        return _MADE[name](rest, model, geometry)
    except ValueError as error:
        raise OptionError(f"score {text!r}; expected {SCORE_FORMS[name]}") from error


def _class(rest: str, model: Adapter, geometry: Geometry) -> Score:
    return ClassLogit(_label(rest, model))


def _value(rest: str, model: Adapter, geometry: Geometry) -> Score:
    return Value(int(rest or 0))


def _query(rest: str, model: Adapter, geometry: Geometry) -> Score:
    number, label = rest.split(":", 1)
    return Query(int(number), _label(label, model))


def _box(rest: str, model: Adapter, geometry: Geometry) -> Score:
    corners, label = rest.split(":", 1)
    return Detection(_label(label, model), geometry.box_to_input(_corners(corners)))


def _region(rest: str, model: Adapter, geometry: Geometry) -> Score:
    corners, _, label = rest.partition(":")
    return Region(_label(label, model) if label else 0, box=geometry.box_to_input(_corners(corners)))


def _similarity(rest: str, model: Adapter, geometry: Geometry) -> Score:
    if not rest:
        raise ValueError
    return Similarity.to_image(model, model.preprocess(rest))


def _token(rest: str, model: Adapter, geometry: Geometry) -> Score:
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise OptionError(f"{model.spec} has no words; a score of a token is for models that write text")
    if not rest:
        raise ValueError
    unknown = getattr(tokenizer, "unk_token_id", None)
    for text in (f" {rest}", rest):  # most vocabularies hold words with the space before them
        numbers = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(numbers) == 1 and numbers[0] != unknown:
            return Token(int(numbers[0]))
    raise OptionError(f"{rest!r} is not one token of {model.spec} but {len(numbers)}, or unknown; give another word")


_MADE: dict[str, Callable[[str, Adapter, Geometry], Score]] = {
    "class": _class,
    "value": _value,
    "query": _query,
    "box": _box,
    "region": _region,
    "similarity": _similarity,
    "token": _token,
}


def _label(text: str, model: Adapter) -> int:
    """A class by its index or its name."""
    if text.isdigit():
        return int(text)
    names = [name.lower() for name in model.class_names]
    if text.lower() not in names:
        raise OptionError(f"class {text!r} is not one of {model.spec}; give its name, or its index")
    return names.index(text.lower())


def _corners(text: str) -> Box:
    x0, y0, x1, y1 = (float(part) for part in text.split(","))
    return (x0, y0, x1, y1)
