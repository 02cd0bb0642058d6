"""Tables 1 and 2 and the deletion curves of the paper, from evaluation runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dave_vit.analysis.inputs import hide_folders, method_entry
from dave_vit.analysis.paper.suites import ModelGroup, ReproduceOptions, SuiteCounts, find_published_mean
from dave_vit.evaluate import MetricEntry, Plan, Smoothing, create_engine, evaluate
from dave_vit.evaluate.statistics.scores import read_scores
from dave_vit.evaluate.statistics.summary import Result, build_metric_column
from dave_vit.viz.figures import Drawing
from dave_vit.viz.plots import Floats, create_plots, draw_curves, method_style
from dave_vit.viz.report_section import Column, DetailedTable, Number, ReportFigure, ReportTable, Section, TableCell

_TITLES = {"gridpg": "GridPG", "energypg": "EnergyPG", "deletion": "deletion"}
_POSTPROCESSED = ("gridpg/official", "energypg/official")  # scores of the maps with the authors' post-processing
_TEXT = (
    "Mean and 95 % interval over images, in per cent; higher is better in all three. GridPG: share "
    "of the positive part inside of the class's own cell of a 2x2 grid, chance is 25. EnergyPG: share inside of "
    "the object's region. Deletion: area under the probability of the target while pixels are removed, the least "
    "important first; a removed pixel becomes {baseline}. Maps of the "
    "first table are not smoothed. Bold: the best mean of a column. "
    "The second table of a model has the same maps of all methods with the post-processing of the authors' code: "
    "positive part, half of it Gaussian over 11 pixels, bilateral over 5. That code has it inside of the function that "
    "explains; the paper's text has no such step. So a published number may be one of a method and its filter "
    "together: look for it in both tables, and compare methods with each other within one table only. What a row gains "
    "from the first to the second is due to the filter, which any map can have."
)
_BASELINES = {"zero": "zero, as in the paper", "mean": "the mean colour of the image"}


def plans(group: ModelGroup, counts: SuiteCounts, data: str, seed: int) -> dict[str, Plan]:
    """Return the plans of a group's runs: grids draw on a larger pool of images than the other metrics."""
    methods = tuple(method_entry(label, counts.samples) for label in group.methods)
    grids = _with_postprocessing(MetricEntry("gridpg", {"grids": counts.grids}))
    deletion = MetricEntry("deletion", {"steps": counts.deletion_steps, "baseline": group.baseline})
    images = (*_with_postprocessing(MetricEntry("energypg")), deletion)
    return {
        name: Plan(group.models, methods, metrics, data=data, limit=limit, seeds=(seed,), batch=8)
        for name, metrics, limit in (("grids", grids, counts.pool), ("images", images, counts.pictures))
    }


def _with_postprocessing(entry: MetricEntry) -> tuple[MetricEntry, MetricEntry]:
    """Return a metric of raw maps, and one of the same maps with the authors' post-processing."""
    return entry, replace(entry, label=f"{entry.metric}/official", smoothing=Smoothing("official"))


def score_group(group: ModelGroup, counts: SuiteCounts, data: str, options: ReproduceOptions) -> Section:
    """Score a group of models, or resume where an earlier command stopped."""
    engine, runs = create_engine("local", device=options.device), options.out / "runs"
    results: list[Result] = []
    notes: list[str] = []
    for name, plan in plans(group, counts, data, options.seed).items():
        summary = evaluate(plan, runs / f"{group.name}-{name}", engine=engine, progress=options.progress)
        results += summary["results"]
        notes += summary["notes"]
    text = _TEXT.format(baseline=_BASELINES.get(group.baseline, group.baseline))
    models = " + ".join(entry.label for entry in group.models)
    counted = {name: getattr(counts, name) for name in ("grids", "pictures", "samples")}
    facts = {"models": models, "data": hide_folders(data), **counted, "seed": options.seed}
    drawing = draw_deletion(read_curves(runs / f"{group.name}-images", group.methods), results)
    figure = ReportFigure(f"deletion-{group.name}", drawing, "In brackets: area in per cent.")
    text = " ".join([text, *(f"Note: {note}." for note in notes)])
    rows = [_percent_row(result) for result in results]
    return Section(group.name, group.title, text, facts, list(tables(group, results)), rows, [figure])


def _percent_row(result: Result) -> dict[str, Number]:
    """Return a row of the CSV file, in per cent, with the paper's number."""
    paper = find_published_mean(result["metric"].partition("/")[0], result["model"], result["method"])
    names = ("model", "method", "metric", "mean", "low", "high", "n", "images", "dropped")
    row = {name: result[name] for name in names}
    row |= {name: None if row[name] is None else 100 * row[name] for name in ("mean", "low", "high")}
    return {**row, "paper": paper, "difference": None if None in (paper, row["mean"]) else row["mean"] - paper}


def tables(group: ModelGroup, results: Sequence[Result]) -> Iterator[ReportTable]:
    """Yield two tables per model, raw and post-processed, with the paper's number and the difference if it has one."""
    for label in (entry.label for entry in group.models):
        own = {(result["method"], result["metric"]): result for result in results if result["model"] == label}
        yield _table(label, group.methods, tuple(_TITLES), own)
        yield _table(f"{label}, with the authors' post-processing", group.methods, _POSTPROCESSED, own)


def _table(
    caption: str, methods: Sequence[str], metrics: Sequence[str], results: Mapping[tuple[str, str], Result]
) -> ReportTable:
    columns = []
    for metric in metrics:
        title, own = _TITLES[metric.partition("/")[0]], [results[name, metric] for name in methods]
        columns.append(build_metric_column(title, own, scale=100, digits=1, note=_format_paper))
    sizes = "; ".join(f"{column.title} {column.detail}" for column in columns if column.detail)
    names = Column("method", [TableCell(method_style(name).label) for name in methods])
    rows = DetailedTable([names, *columns]).format(bold=True).rows
    return ReportTable(("method", *(column.title for column in columns)), rows, f"{caption}: {sizes}.")


def _format_paper(result: Result) -> str:
    """Format the paper's number with the difference, if it has one."""
    row: dict[str, Any] = _percent_row(result)
    return "" if row["difference"] is None else f"; paper {row['paper']:.1f} ({row['difference']:+.1f})"


def read_curves(run: Path, methods: Sequence[str]) -> dict[str, dict[str, tuple[Floats, Floats]]]:
    """Read a run's mean deletion curves by model and method: positions on the axis, and heights."""
    models = read_scores(sorted((run / "rows").glob("*.parquet")), methods)
    return {model: rows.tables["deletion"].mean_curves() for model, rows in models.items()}


def draw_deletion(curves: Mapping[str, Mapping[str, tuple[Floats, Floats]]], results: Sequence[Result]) -> Drawing:
    """Draw a plot for each model and a line for each method."""
    areas = {(one["model"], one["method"]): one["mean"] for one in results if one["metric"] == "deletion"}
    figure, plots = create_plots(len(curves), width=7.6, height=4.2, per_row=2)
    for axes, (model, own) in zip(plots, curves.items(), strict=True):
        area = {name: 100 * (areas[model, name] or 0.0) for name in own}
        ranking = sorted(own, key=area.__getitem__, reverse=True)
        labels = {name: f"{method_style(name).label} ({area[name]:.1f})" for name in ranking}
        draw_curves(axes, {name: (100 * own[name][0], own[name][1]) for name in ranking}, labels)
        axes.set(xlabel="pixels removed in %, the least important first", ylabel="probability of the target")
        axes.set(ylim=(-0.02, 1.02))
        axes.set_title(model, fontsize=10)
    return figure
