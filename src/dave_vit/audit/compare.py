"""Comparison of two audits: which reliance appeared, disappeared, or changed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dave_vit.errors import DataError

_SETTINGS = ("model", "data", "maps", "clustered_by", "seed", "versions")


def read_audit(folder: str | Path) -> dict[str, Any]:
    """Return the content of a folder's audit.json."""
    path = Path(folder) / "audit.json"
    try:
        record = json.loads(path.read_bytes())
        [(one["class_index"], one["effect"], one["confirmed"]) for one in record["findings"]]
    except FileNotFoundError as error:
        raise DataError(f"{path.parent}: no report of dave audit; looked for audit.json") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: not written by dave audit, or damaged") from error
    return dict(record)


def compare_audits(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each class with a finding in either audit, those that changed most first.

    A class stands for its first finding, a confirmed one if there is any. ``change`` is the second effect minus the
    first, with its 95 % interval as of independent estimates: images that both audits share make it narrower in fact.
    """
    first, second = _first_findings(before), _first_findings(after)
    rows = [_compare(first.get(index), second.get(index)) for index in first.keys() | second.keys()]
    return sorted(rows, key=lambda row: (row["verdict"] == "", -abs(row["change"][0]) if row["change"] else 0.0))


def _first_findings(record: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the first finding of each class; reports list confirmed ones first."""
    return {one["class_index"]: one for one in reversed(record["findings"])}


def _compare(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any]:
    known: dict[str, Any] = after or before or {}
    change = _subtract(after["effect"], before["effect"]) if before and after else None
    names = {"class": known["class"], "class_index": known["class_index"]}
    return {**names, "before": before, "after": after, "change": change, "verdict": _judge(before, after, change)}


def _subtract(after: list[float], before: list[float]) -> list[float]:
    """Subtract an estimate with its interval from another: widths of independent estimates add in squares."""
    mean = after[0] - before[0]
    half = math.hypot(*((high - low) / 2 for _, low, high in (after, before)))
    return [mean, mean - half, mean + half]


def _judge(before: dict[str, Any] | None, after: dict[str, Any] | None, change: list[float] | None) -> str:
    """Return what changed in a word; empty if nothing is confirmed in either audit."""
    was, is_ = (bool(one and one["confirmed"]) for one in (before, after))
    if not (was or is_):
        return ""
    if change is None:
        return "only in the second" if is_ else "only in the first"
    if change[1] <= 0 <= change[2]:
        return "no clear change"
    if was and is_:
        return "stronger" if change[0] > 0 else "weaker"
    return "appeared" if is_ else "disappeared"


def describe_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield how two audits were made differently, and how the accuracy changed."""
    for name in _SETTINGS:
        if before.get(name) != after.get(name):
            yield f"{name.replace('_', ' ')}: {before.get(name)} -> {after.get(name)}"
    if None not in (accuracies := (before.get("accuracy"), after.get("accuracy"))):
        yield "accuracy: {:.1%} -> {:.1%}".format(*accuracies)
