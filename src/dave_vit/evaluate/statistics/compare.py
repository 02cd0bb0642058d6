"""Two runs side by side: what differs in how they were made, and how far their scores are apart on the same images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dave_vit.errors import DataError, OptionError
from dave_vit.evaluate.statistics.collect import ModelScores, ScoreTable, read_scores
from dave_vit.evaluate.statistics.intervals import estimate_means
from dave_vit.evaluate.store import differences


@dataclass(frozen=True)
class StoredRun:
    """A run as its folder tells it, finished or not.

    Attributes:
        path: of the folder.
        plan: what was computed.
        made_with: versions, the last ones.
        models: rows, by the label of the model.
    """

    path: Path
    plan: Mapping[str, Any]
    made_with: Mapping[str, Any]
    models: Mapping[str, ModelScores]


def read_run(path: str | Path) -> StoredRun:
    """Reads the rows that a folder has so far."""
    path = Path(path)
    try:
        plan = json.loads((path / "plan.json").read_bytes())
        kept = path / "versions.json"
        made_with = json.loads(kept.read_bytes())[-1] if kept.exists() else {}
    except FileNotFoundError as error:
        raise DataError(f"{path}: no run of dave evaluate; looked for plan.json") from error
    except (ValueError, IndexError) as error:
        raise DataError(f"{path}: plan.json or versions.json is damaged") from error
    rows = sorted((path / "rows").glob("*.parquet"))
    if not rows:
        raise DataError(f"{path}: the run has no rows yet")
    return StoredRun(path, plan, made_with, read_scores(rows, [one["label"] for one in plan["methods"]]))


def compare_runs(first: StoredRun, second: StoredRun, pairs: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The second run minus the first, for every model, metric and method of both, over the images that both scored.

    Args:
        first: what it is compared with.
        second: what is new.
        pairs: methods of the first run with those of the second that they are compared with; those of the same name
            where nothing is said.
    """
    names = [one["label"] for one in first.plan["methods"]]
    wanted = dict(pairs or {name: name for name in names})
    for run, labels in ((first, list(wanted)), (second, list(wanted.values()))):
        known = [one["label"] for one in run.plan["methods"]]
        for label in labels if pairs else ():
            if label not in known:
                raise OptionError(f"{run.path} has no method {label!r}; it has: {', '.join(known)}")
    found = [
        {"model": model, "metric": metric, **one}
        for model in first.models.keys() & second.models.keys()
        for metric, table in first.models[model].tables.items()
        if metric in second.models[model].tables
        for one in _differences(table, second.models[model].tables[metric], wanted)
    ]
    if not found:
        raise DataError(
            f"{first.path} and {second.path} share no model, metric and method; name methods with --pair A=B"
        )
    return sorted(found, key=lambda one: (one["model"], one["metric"]))


def _differences(before: ScoreTable, after: ScoreTable, wanted: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    both = [name for name in before.columns if before.shows(name) == after.shows(name)]
    left, right = ([table.columns[name] for name in both] for table in (before, after))
    for old, new in wanted.items():
        if old in before.methods and new in after.methods and both:
            values = [
                table.values[table.methods.index(name)][columns]
                for table, name, columns in ((before, old, left), (after, new, right))
            ]
            place = {unit: number for number, unit in enumerate(dict.fromkeys(before.units[one] for one in left))}
            units, shown = [place[before.units[one]] for one in left], [before.pictures[unit] for unit in place]
            change = estimate_means(np.stack([values[1] - values[0]]), units, pictures=shown)[0]
            if change.n:
                yield {"method": new if old == new else f"{old} -> {new}", **_means(values), **vars(change)}


def _means(values: list[Any]) -> dict[str, float]:
    """Of both runs, over the images that both scored."""
    there = np.isfinite(values[0]) & np.isfinite(values[1])
    return {"before": float(values[0][there].mean()), "after": float(values[1][there].mean())}


def describe_changes(first: StoredRun, second: StoredRun) -> list[str]:
    """In what the plans and the versions of two runs differ, in words."""
    return [*differences(first.plan, second.plan), *differences(first.made_with, second.made_with)]
