"""Parse the classes that a user names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dave_vit.engine.target_names import find_class
from dave_vit.errors import TargetError


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
    if "," in text and not _is_name(text, names):
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


def _is_name(text: str, names: Sequence[str]) -> bool:
    """Return whether the text is the name of a class; some names hold commas."""
    return text.strip().casefold() in (name.casefold() for name in names)
