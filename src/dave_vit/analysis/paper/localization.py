"""Tables 1 and 2 and the deletion curves of the paper, out of runs of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dave_vit.analysis.catalog import method_entry
from dave_vit.analysis.inputs import shown_data
from dave_vit.analysis.paper.suites import ModelGroup, SuiteCounts, published
from dave_vit.evaluate import MetricEntry, Plan, Smoothing, create_engine, evaluate
from dave_vit.evaluate.run import ProgressCallback
from dave_vit.evaluate.statistics.collect import read_scores
from dave_vit.evaluate.statistics.summary import format_sample_size
from dave_vit.viz import Drawing
from dave_vit.viz.pages import format_estimate
from dave_vit.viz.plots import Floats, create_plots, draw_curves, method_style
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section

METRICS = ("gridpg", "energypg", "deletion")
POSTPROCESSED = ("gridpg/official", "energypg/official")  # of the same maps, as the authors' code treats its own
_TITLES = {"gridpg": "GridPG", "energypg": "EnergyPG", "deletion": "deletion"}
_POSTPROCESSED = (
    "The second table of a model has the same maps of all methods with the post-processing of the authors' code: "
    "positive part, half of it Gaussian over 11 pixels, bilateral over 5. That code has it inside of the function that "
    "explains; the paper's text has no such step. So a published number may be one of a method and its filter "
    "together: look for it in both tables, and compare methods with each other within one table only. What a row gains "
    "from the first to the second is the filter's, which any map can have."
)
_BASELINES = {"zero": "zero, as in the paper", "mean": "the mean colour of the picture"}


@dataclass(frozen=True)
class RunSettings:
    """Where a group is scored, and with what seed."""

    data: str
    runs: Path
    device: str = "cpu"
    seed: int = 0


def plans(group: ModelGroup, counts: SuiteCounts, settings: RunSettings) -> dict[str, Plan]:
    """The runs of a group: grids from a larger pool of pictures than the one that images are scored on."""
    methods = tuple(method_entry(label, counts.samples) for label in group.methods)
    grids = _both(MetricEntry("gridpg", {"grids": counts.grids}))
    deletion = MetricEntry("deletion", {"steps": counts.deletion_steps, "baseline": group.baseline})
    images = (*_both(MetricEntry("energypg")), deletion)
    made = {"grids": (grids, counts.pool), "images": (images, counts.pictures)}
    return {
        name: Plan(group.models, methods, metrics, data=settings.data, limit=limit, seeds=(settings.seed,), batch=8)
        for name, (metrics, limit) in made.items()
    }


def _both(entry: MetricEntry) -> tuple[MetricEntry, MetricEntry]:
    """A metric of raw maps, and of the same maps with the authors' post-processing."""
    return entry, replace(entry, label=f"{entry.metric}/official", smoothing=Smoothing("official"))


def score_group(
    group: ModelGroup, counts: SuiteCounts, settings: RunSettings, watch: ProgressCallback | None = None
) -> Section:
    """Scores a group, or takes up where an earlier command stopped."""
    engine = create_engine("local", device=settings.device)
    results: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, plan in plans(group, counts, settings).items():
        summary = evaluate(plan, settings.runs / f"{group.name}-{name}", engine=engine, progress=watch)
        results += summary["results"]
        notes += summary["notes"]
    curves = read_curves(settings.runs / f"{group.name}-images", group.methods)
    text = (
        "Mean and 95 % interval of a bootstrap over images, in per cent; higher is better in all three. GridPG: share "
        "of the positive part inside of the class's own cell of a 2x2 grid, chance is 25. EnergyPG: share inside of "
        "the object's region. Deletion: area under the probability of the target while pixels are removed, the least "
        f"important first; a removed pixel becomes {_BASELINES.get(group.baseline, group.baseline)}. Maps of the "
        "first table are not smoothed. Bold: the best mean of a column."
    )
    text = " ".join([text, _POSTPROCESSED, *(f"Note: {note}." for note in notes)])
    facts = {
        "models": " + ".join(entry.label for entry in group.models),
        "data": shown_data(settings.data),
        "grids": counts.grids,
        "pictures": counts.pictures,
        "samples": counts.samples,
        "seed": settings.seed,
    }
    rows = [_row(one) for one in results]
    pictures = [
        ReportFigure(f"deletion-{group.name}", curves_figure(curves, results), "In brackets: area in per cent.")
    ]
    return Section(group.name, group.title, text, facts, tables(group, results), rows, pictures)


def _row(one: Mapping[str, Any]) -> dict[str, Number]:
    """A row of the CSV file, in per cent."""
    said = published(one["metric"].partition("/")[0], one["model"], one["method"])
    mean = None if one["mean"] is None else 100 * one["mean"]
    ends = {name: None if one[name] is None else 100 * one[name] for name in ("low", "high")}
    kept = {name: one[name] for name in ("model", "method", "metric")}
    paper = {"paper": said, "difference": None if said is None or mean is None else mean - said}
    return {**kept, "mean": mean, **ends, "n": one["n"], "images": one["images"], "dropped": one["dropped"], **paper}


def tables(group: ModelGroup, results: list[dict[str, Any]]) -> list[ReportTable]:
    """Two tables per model, raw and post-processed, with the paper's number and the difference where there is one."""
    made = []
    for entry in group.models:
        own = {(one["method"], one["metric"]): one for one in results if one["model"] == entry.label}
        made.append(_table(entry.label, group.methods, METRICS, own))
        made.append(_table(f"{entry.label}, with the authors' post-processing", group.methods, POSTPROCESSED, own))
    return made


def _table(
    title: str, methods: Sequence[str], metrics: Sequence[str], own: Mapping[tuple[str, str], Mapping[str, Any]]
) -> ReportTable:
    best = {metric: max(own[name, metric]["mean"] or 0.0 for name in methods) for metric in metrics}
    rows = [
        (method_style(name).label, *(cell(own[name, metric], best[metric]) for metric in metrics)) for name in methods
    ]
    counts = "; ".join(_counts(metric, [own[name, metric] for name in methods]) for metric in metrics)
    return ReportTable(("method", *(_title(metric) for metric in metrics)), tuple(rows), f"{title}: {counts}.")


def _title(metric: str) -> str:
    return _TITLES[metric.partition("/")[0]]


def _counts(metric: str, results: Sequence[Mapping[str, Any]]) -> str:
    """What the numbers of a column rest on; method by method where that differs."""
    said = [format_sample_size(one) for one in results]
    apart = ", ".join(f"{method_style(one['method']).label} {words}" for one, words in zip(results, said, strict=True))
    return f"{_title(metric)} {said[0] if len(set(said)) == 1 else apart}"


def cell(one: Mapping[str, Any], best: float) -> str:
    """Mean, interval, and the paper's number with the difference."""
    if one["mean"] is None:
        return "-"
    row: dict[str, Any] = _row(one)
    words = format_estimate(row["mean"], row["low"], row["high"], digits=1, bold=one["mean"] == best)
    return words if row["paper"] is None else f"{words}; paper {row['paper']:.1f} ({row['difference']:+.1f})"


def read_curves(run: Path, methods: Sequence[str]) -> dict[str, dict[str, tuple[Floats, Floats]]]:
    """Mean deletion curves of a run: by model and method, where on the axis and how high."""
    models = read_scores(sorted((run / "rows").glob("*.parquet")), methods)
    return {model: rows.tables["deletion"].mean_curves() for model, rows in models.items()}


def curves_figure(curves: Mapping[str, Mapping[str, tuple[Floats, Floats]]], results: list[dict[str, Any]]) -> Drawing:
    """A plot for each model, a line for each method."""
    areas = {(one["model"], one["method"]): one["mean"] for one in results if one["metric"] == "deletion"}
    figure, plots = create_plots(len(curves), width=7.6, height=4.2, per_row=2)
    for axes, (model, own) in zip(plots, curves.items(), strict=True):
        area = {name: 100 * (areas[model, name] or 0.0) for name in own}
        ordered = sorted(own, key=area.__getitem__, reverse=True)
        words = {name: f"{method_style(name).label} ({area[name]:.1f})" for name in ordered}
        draw_curves(axes, {name: (100 * own[name][0], own[name][1]) for name in ordered}, words)
        axes.set(xlabel="pixels removed in %, the least important first", ylabel="probability of the target")
        axes.set(ylim=(-0.02, 1.02))
        axes.set_title(model, fontsize=10)
    return figure
