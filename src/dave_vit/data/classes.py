"""Map the classes of a data set to those of a model, and parse the classes that a user names."""

import re
from collections import Counter
from collections.abc import Sequence

from dave_vit.engine.target_names import find_class
from dave_vit.errors import DataError, TargetError


def map_classes(data: Sequence[str], model: Sequence[str]) -> dict[int, int]:
    """Return the model's class of each label of a data set; labels that the model does not know are absent.

    Lists of the same length are matched by position, unless they hold the same names in another order. Others are
    matched by name: the whole name, one of the synonyms separated by commas, or an index.

    Args:
        data: class names of the data set; empty where its labels are the model's own indices.
        model: class names of the model.
    """
    by_name = _match_names(data, model)
    if not data or (len(data) == len(model) and not _is_reordered(data, model, by_name)):
        return {index: index for index in range(len(model))}
    if not by_name:
        given, known = (", ".join(list(names)[:3]) for names in (data, model))
        raise DataError(
            f"none of the {len(data)} classes of the data ({given} ...) is one of the model's {len(model)} ({known} "
            "...); give the model's class names with --classes, or name the folders as the model names its classes"
        )
    return by_name


def _is_reordered(data: Sequence[str], model: Sequence[str], by_name: dict[int, int]) -> bool:
    """Return whether all names match, each once, and most of them at another position."""
    here = sum(not _synonyms(one).isdisjoint(_synonyms(other)) for one, other in zip(data, model, strict=True))
    return len(set(by_name.values())) == len(data) and 2 * here < len(data)


def _match_names(data: Sequence[str], model: Sequence[str]) -> dict[int, int]:
    whole = _unique_names([[_normalise(name)] for name in model])
    parts = _unique_names([_synonyms(name) for name in model])
    indices = {str(index): index for index in range(len(model))}
    classes = {}
    for label, name in enumerate(data):
        tables = ((whole, [_normalise(name)]), (parts, _synonyms(name)), (indices, [name]))
        match = next((table[one] for table, words in tables for one in words if one in table), None)
        if match is not None:
            classes[label] = match
    return classes


def _unique_names(names: Sequence[Sequence[str] | set[str]]) -> dict[str, int]:
    """Map names to indices; a name that two classes share is left out."""
    count = Counter(name for words in names for name in words)
    return {name: index for index, words in enumerate(names) for name in words if count[name] == 1}


def _synonyms(name: str) -> set[str]:
    return {_normalise(part) for part in name.split(",")}


def _normalise(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def parse_targets(text: str | None, ranking: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return the indices of the classes to explain.

    Args:
        text: "top1" to "top5", "all-top5", what `find_class` takes, several of these with commas between, or None
            for the predicted class.
        ranking: class indices, the likeliest first.
        names: class names in the order of the logits.
    """
    if text is None:
        return [ranking[0]]
    if "," in text and text.strip().casefold() not in (name.casefold() for name in names):  # some names hold commas
        parts = [part for part in text.split(",") if part.strip()]
        return list(dict.fromkeys(index for part in parts for index in parse_targets(part, ranking, names)))
    folded = text.strip().casefold()
    if folded == "all-top5":
        return list(ranking[:5])
    place = re.fullmatch(r"top-?(\d+)", folded)
    if place is None:
        return [find_class(text, names)]
    at = int(place[1])
    if not 1 <= at <= min(5, len(ranking)):
        raise TargetError(f"target {text!r}; expected top1 to top{min(5, len(ranking))}, an index or a class name")
    return [ranking[at - 1]]
