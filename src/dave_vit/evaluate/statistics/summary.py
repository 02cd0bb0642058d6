"""Summary of a run: means with intervals, paired differences, and what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import MetricEntry
from dave_vit.evaluate.statistics.intervals import estimate_differences, estimate_means
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.evaluate.statistics.scores import ModelScores, ScoreTable
from dave_vit.metrics import GridMetric

Result = Mapping[str, Any]
"""An entry of "results" in ``summary.json``."""


def summarise(
    plan: Plan,
    images: int,
    scores: Sequence[ModelScores],
    left_out: Sequence[Mapping[str, str]],
    unreadable: Sequence[ScannedImage],
) -> dict[str, Any]:
    """Return the content of ``summary.json``.

    Args:
        plan: the plan of the run.
        images: size of the data set.
        scores: scores of each model.
        left_out: for each model, images that no method was tried on, with the reason.
        unreadable: images that could not be read.
    """
    results: list[Result] = []
    differences: list[Result] = []
    for entry, own, missing in zip(plan.models, scores, left_out, strict=True):
        results += summarise_model(plan, entry.label, own, missing)
        differences += [one for metric in plan.metrics for one in _differences(entry.label, metric, own)]
    return {
        "results": results,
        "differences": differences,
        "skipped": [{"image": one.name, "reason": one.dropped} for one in unreadable],
        "data": plan.data,
        "images": images,
        "versions": sorted({version for own in scores for version in own.versions}),
        "devices": sorted({device for own in scores for device in own.devices}),
    }


def summarise_model(plan: Plan, model: str, scores: ModelScores, left_out: Mapping[str, str]) -> list[Result]:
    """Return the results of one model: an entry for each metric and method."""
    methods = [entry.label for entry in plan.methods]
    return [
        one
        for metric in plan.metrics
        for one in _results(model, metric, scores.tables.get(metric.label) or ScoreTable(methods), left_out)
    ]


def format_sample_size(result: Result) -> str:
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
    return [f"more than the budget of {budget} passes a map took {each}: {why}"]


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


def _differences(model: str, entry: MetricEntry, scores: ModelScores) -> list[Result]:
    table = scores.tables.get(entry.label)
    if table is None:
        return []
    shared, bounds = {"model": model, "metric": entry.label}, entry.create().bounds
    estimates = estimate_differences(table.values, table.units, pictures=table.pictures, bounds=bounds)
    return [
        {**shared, "first": table.methods[first], "second": table.methods[second], **vars(estimate)}
        for first, second, estimate in estimates
    ]
