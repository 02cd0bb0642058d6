"""Class names: those of ImageNet, and those of a text or JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dave_vit.errors import ModelError

Classes = str | Path | Sequence[str]
"""A file of names (one a line, or JSON), or the names themselves."""


def class_names(count: int, classes: Classes | None = None, *, known: Sequence[str] | None = None) -> list[str]:
    """Return one name for each of ``count`` logits.

    Args:
        count: number of logits.
        classes: names or a file given by the user, if any.
        known: names that came with the model or its weights.
    """
    names = read_classes(classes) if classes is not None else known
    if names is None:
        return imagenet_names() if count == 1000 else [f"class {index}" for index in range(count)]
    if len(names) != count:
        raise ModelError(f"{len(names)} class names for a model of {count} classes; give one name a class, in order")
    return list(names)


def read_classes(classes: Classes) -> list[str]:
    """Read names from a text file (one a line) or a JSON file (a list, or an object from index to name)."""
    if not isinstance(classes, str | Path):
        return [str(name) for name in classes]
    path = Path(classes)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # binary content, or a name that no file can have
        raise ModelError(f"{path}: cannot be read; give a text file with one class name a line, or JSON") from error
    if path.suffix.lower() != ".json":
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        return _from_json(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f'{path}: expected a JSON list of names, or an object such as {{"0": "cat"}}') from error


def _from_json(value: object) -> list[str]:
    if isinstance(value, dict):
        indexed = {int(index): name for index, name in value.items()}
        if sorted(indexed) != list(range(len(indexed))):
            raise ValueError("indices with gaps")
        value = [indexed[index] for index in range(len(indexed))]
    if not isinstance(value, list):
        raise TypeError("no list")
    # torchvision's imagenet_class_index.json holds pairs of synset and name
    return [str(name[-1] if isinstance(name, list) else name) for name in value]


# Classes whose first lemma is that of another class.
_TWINS = {134: "crane (bird)", 517: "crane (machine)", 638: "maillot", 639: "maillot, tank suit"}


def imagenet_names() -> list[str]:
    """Return the thousand class names of ImageNet-1k, short and unique."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    return [_TWINS.get(index, info.index_to_description(index).split(",")[0]) for index in range(1000)]
