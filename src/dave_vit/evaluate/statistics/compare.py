"""Comparison of two runs: how they were computed, and how far their scores are apart on the same images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dave_vit.errors import DataError, OptionError
from dave_vit.evaluate.statistics.intervals import difference_bounds, estimate_means
from dave_vit.evaluate.statistics.scores import ModelScores, ScoreTable, read_scores
from dave_vit.evaluate.store import describe_differences
from dave_vit.metrics import METRICS

_LISTS = {"models": "model", "metrics": "metric", "methods": "method"}


@dataclass(frozen=True)
class StoredRun:
    """A run as its folder holds it, finished or not.

    Attributes:
        path: the folder.
        plan: content of ``plan.json``.
        provenance: software and weights that computed it last.
        methods: labels of the methods.
        models: scores by the label of the model.
    """

    path: Path
    plan: Mapping[str, Any]
    provenance: Mapping[str, Any]
    methods: Sequence[str]
    models: Mapping[str, ModelScores]


def read_run(path: str | Path) -> StoredRun:
    """Read the rows that a run has so far."""
    path = Path(path)
    try:
        plan, versions = (json.loads((path / name).read_bytes()) for name in ("plan.json", "versions.json"))
        provenance, methods = versions[-1], [one["label"] for one in plan["methods"]]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no run of dave evaluate; looked for plan.json and versions.json") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: plan.json or versions.json is damaged") from error
    rows = sorted((path / "rows").glob("*.parquet"))
    if not rows:
        raise DataError(f"{path}: the run has no rows yet")
    return StoredRun(path, plan, provenance, methods, read_scores(rows, methods))


def pair_methods(first: StoredRun, second: StoredRun, pairs: Mapping[str, str]) -> Mapping[str, str]:
    """Return methods of the first run with methods of the second: those given, else methods of the same name."""
    for run, labels in ((first, pairs.keys()), (second, pairs.values())):
        for label in labels:
            if label not in run.methods:
                raise OptionError(f"{run.path} has no method {label!r}; it has: {', '.join(run.methods)}")
    return pairs or {name: name for name in first.methods if name in second.methods}


def compare_runs(first: StoredRun, second: StoredRun, pairs: Mapping[str, str]) -> list[dict[str, Any]]:
    """Estimate the second run minus the first for every model, metric and pair of methods, on images that both scored.

    Args:
        first: the baseline.
        second: the new run.
        pairs: methods of the first run with methods of the second.
    """
    known = [one for one in first.plan["metrics"] if one["metric"] in METRICS]  # plugins are not loaded
    bounds = {one["label"]: difference_bounds(METRICS[one["metric"]].bounds) for one in known}
    rows = [
        {"model": model, "metric": metric, **one}
        for model in first.models.keys() & second.models.keys()
        for metric, table in first.models[model].tables.items()
        if metric in second.models[model].tables
        for one in _differences(table, second.models[model].tables[metric], pairs, bounds.get(metric))
    ]
    if not rows:
        raise DataError(
            f"{first.path} and {second.path} share no model, metric and method; name methods with --pair A=B"
        )
    return sorted(rows, key=lambda one: (one["model"], one["metric"]))


def describe_changes(first: StoredRun, second: StoredRun, pairs: Mapping[str, str]) -> list[str]:
    """Describe how two runs differ: settings, models, metrics, methods that are compared, and versions."""
    before, now = ({**run.plan, **dict.fromkeys(_LISTS)} for run in (first, second))
    changes = list(describe_differences(before, now))
    for kind, noun in _LISTS.items():
        before, now = ({one["label"]: {**one, "label": None} for one in run.plan[kind]} for run in (first, second))
        compared = pairs if kind == "methods" else {name: name for name in before if name in now}
        for old, new in compared.items():
            name = new if old == new else f"{old} -> {new}"
            changes += describe_differences(before[old], now[new], f"{noun} {name}:")
        for run, names in ((first, before.keys() - compared.keys()), (second, now.keys() - set(compared.values()))):
            changes += [f"{noun} {name} is only in {run.path}" for name in sorted(names) if first is not second]
    return [*changes, *describe_differences(first.provenance, second.provenance)]


def _differences(
    before: ScoreTable, after: ScoreTable, pairs: Mapping[str, str], bounds: tuple[float, float] | None
) -> Iterator[dict[str, Any]]:
    shared = [name for name, content in before.contents.items() if after.contents.get(name) == content]
    columns, other = ([table.columns[name] for name in shared] for table in (before, after))
    index = {unit: number for number, unit in enumerate(dict.fromkeys(before.units[one] for one in columns))}
    units, pictures = [index[before.units[one]] for one in columns], [before.pictures[unit] for unit in index]
    for old, new in pairs.items():
        values = np.stack(
            [before.values[before.methods.index(old)][columns], after.values[after.methods.index(new)][other]]
        )
        change = estimate_means(values[1:] - values[:1], units, pictures=pictures, bounds=bounds)[0]
        if change.n:
            means = values[:, np.isfinite(values).all(0)].mean(1).tolist()
            name = new if old == new else f"{old} -> {new}"
            yield {"method": name, "before": means[0], "after": means[1], **vars(change)}
