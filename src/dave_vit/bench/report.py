"""The report of a run: what it shows, and the Markdown page of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dave_vit.bench.examples import Example
from dave_vit.bench.numbers.collect import Collected
from dave_vit.bench.plan import MetricEntry, ModelEntry, Plan
from dave_vit.bench.store import RunFolder
from dave_vit.bench.tasks import Task


@dataclass(frozen=True)
class Report:
    """What a report shows.

    Attributes:
        plan: of the run.
        summary: the content of ``summary.json``.
        collected: rows of each model.
        examples: for each model and method, example images and the task that made their maps.
        folder: where those maps are.
    """

    plan: Plan
    summary: dict[str, Any]
    collected: Sequence[Collected]
    examples: Sequence[Sequence[tuple[Task, list[Example]]]]
    folder: RunFolder

    def result(self, model: str, method: str, metric: str) -> dict[str, Any]:
        """One entry of the summary."""
        wanted = (model, method, metric)
        return next(one for one in self.summary["results"] if (one["model"], one["method"], one["metric"]) == wanted)

    def best(self, model: str, metric: MetricEntry) -> float | None:
        """The best mean of a metric."""
        found = [
            one["mean"]
            for one in self.summary["results"]
            if one["model"] == model and one["metric"] == metric.label and one["mean"] is not None
        ]
        return (max if metric.create().higher_is_better else min)(found, default=None)

    def facts(self) -> list[tuple[str, str]]:
        """What a reader must know of the run."""
        plan, smoothing = self.plan, self.plan.smoothing
        window = f" ({smoothing.size} pixels)" if smoothing.kind in ("mean", "gaussian") else ""
        least = plan.min_confidence
        filtered = "" if least is None else f", only if classified correctly with more than {least:g}"
        return [
            ("data", f"{plan.data}: {self.summary['images']} images"),
            ("explained class", plan.target + filtered),
            ("smoothing of maps", f"{smoothing.kind}{window}"),
            ("seeds", ", ".join(map(str, plan.seeds))),
            ("device", ", ".join(self.summary["devices"])),
            ("versions", "; ".join(self.summary["versions"])),
        ]


def markdown(report: Report) -> str:
    """The report in Markdown: one table per model."""
    lines = ["# Evaluation", "", *(f"- {name}: {value}" for name, value in report.facts()), ""]
    for model in report.plan.models:
        lines += [f"## {model.label}", "", "Mean, with its bootstrap 95 % interval in brackets.", ""]
        heads = [f"{one.label} {arrow(one)}" for one in report.plan.metrics]
        lines += [f"| method | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
        for method in report.plan.methods:
            found = [report.result(model.label, method.label, one.label) for one in report.plan.metrics]
            lines.append(f"| {method.label} | {' | '.join(map(_words, found))} |")
        lines += ["", *_dropped_lines(report, model), ""]
    lines += [f"- {note}" for note in report.summary["notes"]]
    if report.summary["skipped"]:
        lines += [f"{len(report.summary['skipped'])} images could not be read; summary.json lists them.", ""]
    return "\n".join(lines)


def arrow(entry: MetricEntry) -> str:
    """Which direction is good."""
    return "↑" if entry.create().higher_is_better else "↓"


def _words(result: dict[str, Any]) -> str:
    if result["mean"] is None:
        return "-"
    return f"{result['mean']:.3f} [{result['low']:.3f}, {result['high']:.3f}]"


def dropped(report: Report, model: ModelEntry) -> list[tuple[str, str]]:
    """Method and metric, and what was left out of it."""
    found = []
    for one in report.summary["results"]:
        if one["model"] == model.label and (one["dropped"] or not one["n"]):
            reasons = "; ".join(f"{count} x {reason}" for reason, count in one["reasons"].items())
            found.append((f"{one['method']}, {one['metric']}", f"n = {one['n']}, {reasons or 'nothing to score'}"))
    return found


def _dropped_lines(report: Report, model: ModelEntry) -> list[str]:
    return [f"- {where}: {what}" for where, what in dropped(report, model)]
