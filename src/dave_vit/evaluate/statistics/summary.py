"""The numbers of a run: means with intervals, paired differences, what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import MetricEntry
from dave_vit.evaluate.statistics.collect import ModelScores, ScoreTable
from dave_vit.evaluate.statistics.intervals import NOTHING, estimate_differences, estimate_means
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.metrics import GridMetric


def summarise(
    plan: Plan,
    images: int,
    collected: Sequence[ModelScores],
    left_out: Sequence[Mapping[str, str]],
    skipped: Sequence[ScannedImage],
) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        plan: of the run.
        images: of the data set.
        collected: rows of each model.
        left_out: of each model, images that no method was tried on, with the reason.
        skipped: images that could not be read.
    """
    results: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for entry, rows, missing in zip(plan.models, collected, left_out, strict=True):
        for metric in plan.metrics:
            table = rows.tables.get(metric.label) or ScoreTable([one.label for one in plan.methods])
            results += _results(entry.label, metric, table, missing)
            differences += _differences(entry.label, metric, table)
    return {
        "results": results,
        "differences": differences,
        "skipped": [{"image": one.name, "reason": one.dropped} for one in skipped],
        "data": plan.data,
        "images": images,
        "versions": sorted({version for rows in collected for version in rows.versions}),
        "devices": sorted({device for rows in collected for device in rows.devices}),
    }


def format_sample_size(one: Mapping[str, Any]) -> str:
    """How many numbers a mean is of, and of how many distinct images they are."""
    return f"n = {one['n']}" if one["n"] == one["images"] else f"n = {one['n']} of {one['images']} images"


def over_budget(plan: Plan, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """That some methods took more passes than the plan allows, and how many, where there are such."""
    if plan.budget is None:
        return []
    # Maps of the cells of a grid share their passes; those of one image do not.
    first = min(plan.metrics, key=lambda entry: isinstance(entry.create(), GridMetric)).label
    taken = [(one["method"], one["passes"]) for one in results if one["metric"] == first and one["passes"]]
    above = dict(sorted((pair for pair in taken if pair[1] > plan.budget), key=lambda pair: pair[1]))
    if not above:
        return []
    each = ", ".join(f"{method} {passes:.4g}" for method, passes in above.items())
    why = "their number is fixed, or images began again in a narrower neighbourhood"
    return [f"more than the budget of {plan.budget} passes a map took {each}: {why}"]


def _results(model: str, entry: MetricEntry, table: ScoreTable, missing: Mapping[str, str]) -> list[dict[str, Any]]:
    metric = entry.create()
    some = isinstance(metric, GridMetric) or metric.images is not None  # and the others are not its business
    before: Counter[str] = Counter() if some else Counter(missing.values())
    nothing = [NOTHING] * len(table.methods)
    means = estimate_means(table.values, table.units, pictures=table.pictures) if table.columns else nothing
    rows = []
    for number, (method, estimate) in enumerate(zip(table.methods, means, strict=True)):
        reasons = table.reasons(number) + before
        rows.append(
            {
                "model": model,
                "method": method,
                "metric": entry.label,
                **vars(estimate),
                "dropped": reasons.total(),
                "reasons": dict(reasons.most_common()),
                "empty": table.empty(number).total(),
                "higher_is_better": metric.higher_is_better,
                **table.costs(number),
            }
        )
    return rows


def _differences(model: str, entry: MetricEntry, table: ScoreTable) -> list[dict[str, Any]]:
    if not table.columns:
        return []
    return [
        {
            "model": model,
            "metric": entry.label,
            "first": table.methods[i],
            "second": table.methods[j],
            **vars(estimate),
        }
        for i, j, estimate in estimate_differences(table.values, table.units, pictures=table.pictures)
    ]
