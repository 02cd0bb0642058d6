"""Summary of a run: means with intervals, paired differences, what was left out; and how far two runs are apart."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dave_vit.errors import DataError, OptionError
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import MetricEntry
from dave_vit.evaluate.statistics.intervals import difference_bounds, estimate_differences, estimate_means
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.evaluate.statistics.scores import ModelScores, ScoreTable, read_scores
from dave_vit.evaluate.store import describe_differences
from dave_vit.evaluate.tasks import EvalTask
from dave_vit.metrics import METRICS, GridMetric
from dave_vit.viz.report_section import Column, DetailedTable, TableCell, estimate_cell

Result = Mapping[str, Any]
"""An entry of "results" in ``summary.json``."""


@dataclass(frozen=True)
class ModelRun:
    """What a run has of one model.

    Attributes:
        label: its label.
        images: all images with its predictions.
        left_out: reasons by name of images that no method is tried on.
        tasks: tasks whose files hold its rows.
        notes: notes for the report.
        scores: its rows.
    """

    label: str
    images: Sequence[ScannedImage]
    left_out: Mapping[str, str]
    tasks: Sequence[EvalTask]
    notes: Sequence[str]
    scores: ModelScores = field(default_factory=ModelScores)


def summarise(plan: Plan, images: int, models: Sequence[ModelRun]) -> dict[str, Any]:
    """Return the content of ``summary.json``.

    Args:
        plan: the plan of the run.
        images: size of the data set.
        models: the models of the plan.
    """
    results: list[Result] = []
    differences: list[Result] = []
    methods = [entry.label for entry in plan.methods]
    for model in models:
        for metric in plan.metrics:
            table = model.scores.tables.get(metric.label)
            results += _results(model.label, metric, table or ScoreTable(methods), model.left_out)
            differences += _differences(model.label, metric, table) if table else []
    unreadable = {one.name: one.dropped for model in models for one in model.images if one.predicted is None}
    return {
        "results": results,
        "differences": differences,
        "skipped": [{"image": name, "reason": reason} for name, reason in unreadable.items()],
        "data": plan.data,
        "images": images,
        "versions": sorted({version for model in models for version in model.scores.versions}),
        "devices": sorted({device for model in models for device in model.scores.devices}),
    }


def _format_sample_size(result: Result) -> str:
    """Return the number of scores of a mean, and of distinct images if that is another number."""
    return f"n = {result['n']}" + ("" if result["n"] == result["images"] else f" of {result['images']} images")


def select_cost_metric(metrics: Sequence[MetricEntry]) -> str:
    """Return the metric whose rows tell what a map costs: maps of the cells of a grid share their passes."""
    return min(metrics, key=lambda entry: isinstance(entry.create(), GridMetric)).label


def describe_budget_overruns(plan: Plan, results: Sequence[Result]) -> list[str]:
    """Return a note on the methods that took more passes than the plan allows, if there are any."""
    metric, budget = select_cost_metric(plan.metrics), plan.budget
    passes = sorted((one["passes"], one["method"]) for one in results if one["metric"] == metric and one["passes"])
    above = {method: count for count, method in passes if budget is not None and count > budget}
    if not above:
        return []
    each = ", ".join(f"{method} {count:.4g}" for method, count in above.items())
    why = "their number is fixed, or images began again in a narrower neighbourhood"
    return [f"more than the budget of {budget} passes per map: {each}; {why}"]


def _results(model: str, entry: MetricEntry, table: ScoreTable, left_out: Mapping[str, str]) -> Iterator[Result]:
    metric = entry.create()
    selects = isinstance(metric, GridMetric) or metric.images is not None  # it leaves out images by itself
    before: Counter[str] = Counter() if selects else Counter(left_out.values())
    estimates = estimate_means(table.values, table.units, pictures=table.pictures, bounds=metric.bounds)
    for number, estimate in enumerate(estimates):
        reasons = table.count_reasons(number) + before
        yield {
            "model": model,
            "method": table.methods[number],
            "metric": entry.label,
            **vars(estimate),
            "dropped": reasons.total(),
            "reasons": dict(reasons.most_common()),
            "empty": table.count_empty(number),
            "higher_is_better": metric.higher_is_better,
            **table.costs(number),
        }


def _differences(model: str, entry: MetricEntry, table: ScoreTable) -> list[Result]:
    shared, bounds = {"model": model, "metric": entry.label}, entry.create().bounds
    estimates = estimate_differences(table.values, table.units, pictures=table.pictures, bounds=bounds)
    names = table.methods
    return [{**shared, "first": names[first], "second": names[second], **vars(one)} for first, second, one in estimates]


def build_results_table(plan: Plan, results: Sequence[Result], model: str) -> DetailedTable:
    """Return the results of a model: a row per method; a column more is a line more here.

    Args:
        plan: the plan of the run.
        results: results as in ``summary.json``.
        model: label of the model.
    """
    by_key = {(one["method"], one["metric"]): one for one in results if one["model"] == model}
    methods = [entry.label for entry in plan.methods]
    cost_metric = select_cost_metric(plan.metrics)
    costs = [by_key[method, cost_metric] for method in methods]
    source = cost_metric if len(plan.metrics) > 1 else ""

    def metric_column(entry: MetricEntry) -> Column:
        own, tooltip = [by_key[method, entry.label] for method in methods], entry.create().summary
        return build_metric_column(format_title(entry), own, tooltip=tooltip)

    columns = [
        Column("method", [TableCell(method) for method in methods]),
        *map(metric_column, plan.metrics),
        Column("passes per map", [_number_cell(one["passes"]) for one in costs], source),
        Column("seconds per map", [_number_cell(one["map_seconds"]) for one in costs], source),
    ]
    return DetailedTable(columns, model)


def build_metric_column(
    title: str,
    results: Sequence[Result],
    *,
    scale: float = 1.0,
    digits: int = 3,
    note: Callable[[Result], str] = lambda result: "",
    tooltip: str = "",
) -> Column:
    """Return a column of means with their intervals, in which the best mean is marked.

    Args:
        title: head of the column.
        results: one for each row.
        scale: factor of all numbers, such as 100 for per cent.
        digits: digits after the decimal point.
        note: text after the interval of a result.
        tooltip: what the metric measures.
    """
    means = [one["mean"] for one in results if one["mean"] is not None]
    best = (max if results[0]["higher_is_better"] else min)(means, default=None)
    sizes = [_format_sample_size(one) for one in results]
    shared = sizes[0] if len(set(sizes)) == 1 else ""
    cells = []
    for result, size in zip(results, sizes, strict=True):
        numbers = [None if result[name] is None else scale * result[name] for name in ("mean", "low", "high")]
        extra = ("" if shared else f" ({size})") + ("" if result["mean"] is None else note(result))
        cells.append(estimate_cell(*numbers, digits=digits, note=extra, is_best=result["mean"] == best is not None))
    return Column(title, cells, shared, tooltip)


def format_title(entry: MetricEntry) -> str:
    """Return the label of a metric with an arrow in the direction of better scores."""
    return f"{entry.label} {'↑' if entry.create().higher_is_better else '↓'}"


def _number_cell(value: float | None) -> TableCell:
    return TableCell("-" if value is None else f"{value:.3g}")


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
        for one in _compare_tables(table, second.models[model].tables[metric], pairs, bounds.get(metric))
    ]
    if not rows:
        how = "name methods with --pair A=B"
        raise DataError(f"{first.path} and {second.path} share no model, metric and method; {how}")
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


def _compare_tables(
    before: ScoreTable, after: ScoreTable, pairs: Mapping[str, str], bounds: tuple[float, float] | None
) -> Iterator[dict[str, Any]]:
    shared = [name for name, content in before.contents.items() if after.contents.get(name) == content]
    columns, other = ([table.columns[name] for name in shared] for table in (before, after))
    index = {unit: number for number, unit in enumerate(dict.fromkeys(before.units[one] for one in columns))}
    units, pictures = [index[before.units[one]] for one in columns], [before.pictures[unit] for unit in index]
    for old, new in pairs.items():
        rows = before.values[before.methods.index(old)][columns], after.values[after.methods.index(new)][other]
        values = np.stack(rows)
        change = estimate_means(values[1:] - values[:1], units, pictures=pictures, bounds=bounds)[0]
        if change.n:
            means = values[:, np.isfinite(values).all(0)].mean(1).tolist()
            name = new if old == new else f"{old} -> {new}"
            yield {"method": name, "before": means[0], "after": means[1], **vars(change)}
