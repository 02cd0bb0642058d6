"""What the report of a run shows: a view of each model, made of rows, summary and example maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dave_vit.errors import first_line
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import MetricEntry
from dave_vit.evaluate.statistics.collect import ModelScores, rank_columns
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.evaluate.statistics.summary import format_sample_size
from dave_vit.evaluate.store import DamagedFile
from dave_vit.methods.options import declared_options, max_samples
from dave_vit.metrics import GridMetric
from dave_vit.viz.pages import render

if TYPE_CHECKING:
    from dave_vit.viz import Drawing

_Bytes = npt.NDArray[np.uint8]
_FEW = 8  # methods up to which the tables of differences are shown unfolded
_PLACES = ("best", "median", "worst")
_PREFERRED = ("energypg", "deletion", "insertion")  # to pick the examples by


@dataclass(frozen=True)
class Example:
    """An image that stands for a method's scores: its place among them, the image, its score, and where its map is."""

    place: str
    image: ScannedImage
    value: float
    maps: Path

    def arrays(self) -> list[Any]:
        """Image, map and region."""
        with np.load(self.maps) as arrays:
            return [arrays[f"{name}-{self.image.index}"] for name in ("image", "map", "region")]

    def pictures(self) -> tuple[Image.Image, Image.Image]:
        """The image, and the map over it; the object's region is outlined."""
        from dave_vit.viz import overlay

        image, heat, region = self.arrays()
        over = (overlay(image, np.nan_to_num(heat)) * 255).round().astype(np.uint8)
        return Image.fromarray(_outlined(image, region)), Image.fromarray(_outlined(over, region))


def check_examples(examples: Iterable[Example]) -> None:
    """Raises `DamagedFile` where a map cannot be read."""
    for example in examples:
        try:
            example.arrays()
        except Exception as error:  # whatever the bytes are
            raise DamagedFile(example.maps, first_line(error)) from error


def _outlined(image: _Bytes, region: npt.NDArray[np.bool_]) -> _Bytes:
    """The image with the edge of the object's region in white."""
    inner = region.copy()
    for axis in (0, 1):
        for step in (1, -1):
            inner &= np.roll(region, step, axis)
    out = image.copy()
    out[region & ~inner] = 255
    return out


def example_metric(plan: Plan) -> MetricEntry | None:
    """The metric that picks the examples."""
    entries = [entry for entry in plan.metrics if not isinstance(entry.create(), GridMetric)]
    preference = {name: place for place, name in enumerate(_PREFERRED)}
    return min(entries, key=lambda entry: preference.get(entry.metric, len(preference)), default=None)


def example_columns(collected: ModelScores, entry: MetricEntry) -> Iterator[dict[str, tuple[str, float]]]:
    """For each method, by place: the name of the image where it scores best, in the middle and worst, and its score."""
    table = collected.tables.get(entry.label)
    if table is None:
        return
    for row in table.values:
        order = rank_columns(row, higher_is_better=entry.create().higher_is_better)
        picks = dict(zip((0, len(order) // 2, len(order) - 1), _PLACES, strict=False)) if len(order) else {}
        yield {place: (table.images[order[k]], float(row[order[k]])) for k, place in picks.items()}


@dataclass(frozen=True)
class Column:
    """A metric in the tables of a model; ``sample_size`` is how many numbers of how many images, if all agree."""

    label: str
    summary: str
    arrow: str
    best: float | None
    sample_size: str


@dataclass(frozen=True)
class Cost:
    """What a map takes: forward passes of the explained picture, and seconds; None where no map was made."""

    passes: float | None
    seconds: float | None

    @property
    def words(self) -> tuple[str, str]:
        """Both for a table."""
        if self.passes is None or self.seconds is None:
            return "-", "-"
        return f"{self.passes:.3g}", f"{self.seconds:.3g}"


@dataclass(frozen=True)
class ModelReport:
    """What the report shows of one model.

    Attributes:
        model: its label.
        methods: labels, one row each.
        metrics: one column each.
        results: entries of the summary, by method and metric.
        left_out: method and metric, and what was left out of it.
        differences: by metric, the mean of a first method minus a second one with its interval.
        curves: a plot for each metric that has any.
        examples: by method.
        costs: of a map, by method.
    """

    model: str
    methods: Sequence[str]
    metrics: Sequence[Column]
    results: Mapping[tuple[str, str], Mapping[str, Any]]
    left_out: Sequence[tuple[str, str]]
    differences: Mapping[str, Mapping[tuple[str, str], Mapping[str, float]]]
    curves: Sequence[Drawing]
    examples: Mapping[str, Sequence[Example]]
    costs: Mapping[str, Cost]


def pages(plan: Plan, summary: Mapping[str, Any], views: Sequence[ModelReport]) -> dict[str, bytes]:
    """The report, in Markdown and as one HTML file with differences, curves and examples."""
    picked_by = example_metric(plan)
    content = {
        "title": "dave evaluate",
        "heading": "Evaluation",
        "facts": _facts(plan, summary),
        "notes": summary["notes"],
        "skipped": summary["skipped"],
        "views": views,
        "few": _FEW,
        "format_sample_size": format_sample_size,
        "example_metric": picked_by.label if picked_by else "",
    }
    return {f"report.{kind}": render(f"run.{kind}", **content).encode() for kind in ("md", "html")}


def _facts(plan: Plan, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a reader must know of the run."""
    smoothing, least = plan.smoothing, plan.min_confidence
    window = f" ({smoothing.size} pixels)" if smoothing.kind in ("mean", "gaussian") else ""
    filtered = "" if least is None else f", only if classified correctly with more than {least:g}"
    command = [("command", summary["command"])] if summary["command"] else []
    return [
        *command,
        ("data", f"{plan.data}: {summary['images']} images"),
        ("weights", "; ".join(_weights(plan, summary["weights"]))),
        ("samples", ", ".join(_samples(plan)) or "no method draws any"),
        ("explained class", plan.target + filtered + _against(plan)),
        *_prepared(plan),
        ("smoothing of maps", f"{smoothing.kind}{window}"),
        ("seeds", ", ".join(map(str, plan.seeds))),
        ("device", ", ".join(summary["devices"])),
        ("versions", "; ".join(summary["versions"])),
    ]


def _weights(plan: Plan, digests: Mapping[str, str]) -> Iterator[str]:
    """Of each model: the file, where one was given, and what they are by content."""
    for model in plan.models:
        named = model.label if model.label == model.spec else f"{model.label} ({model.spec})"
        content = f", content {digests[model.label]}" if model.label in digests else ""
        yield f"{named}: {Path(model.weights).name if model.weights else 'its own'}{content}"


def _against(plan: Plan) -> str:
    """What classes are set against, where the plan says it."""
    said = [f"{method.label} against {method.against}" for method in plan.methods if method.against is not None]
    return f"; {', '.join(said)}" if said else ""


def _prepared(plan: Plan) -> Iterator[tuple[str, str]]:
    """What is done to photographs in the place of what a model's own preprocessing does, as flags say it."""
    said = [f"{model.label} {' '.join(model.prepare.flags)}" for model in plan.models if model.prepare]
    if said:
        yield "preprocessing", "; ".join(said)


def _samples(plan: Plan) -> Iterator[str]:
    """Of each method that draws any."""
    for method in plan.methods:
        if "samples" in declared_options(method.method):
            most = max_samples(method.method, method.options)
            yield f"{method.label} {'at most ' if method.options.get('samples') == 'auto' else ''}{most}"


def view(
    plan: Plan,
    summary: Mapping[str, Any],
    model: str,
    collected: ModelScores,
    examples: Mapping[str, Sequence[Example]],
) -> ModelReport:
    """What the report shows of a model, out of the summary and the model's rows."""
    results = {(one["method"], one["metric"]): one for one in summary["results"] if one["model"] == model}
    columns = [
        _column(entry, [one for (_, label), one in results.items() if label == entry.label]) for entry in plan.metrics
    ]
    differences = {
        f"{column.label} {column.arrow}": table
        for column in columns
        if (table := _differences(summary, model, column.label))
    }
    return ModelReport(
        model,
        [method.label for method in plan.methods],
        columns,
        results,
        list(_left_out(results)),
        differences,
        list(_curves(plan, collected)),
        examples,
        _costs(plan, results),
    )


def _column(entry: MetricEntry, results: Sequence[Mapping[str, Any]]) -> Column:
    metric = entry.create()
    means = [one["mean"] for one in results if one["mean"] is not None]
    counts = {format_sample_size(one) for one in results}
    best = (max if metric.higher_is_better else min)(means, default=None)
    arrow = "↑" if metric.higher_is_better else "↓"
    return Column(entry.label, metric.summary, arrow, best, counts.pop() if len(counts) == 1 else "")


def _costs(plan: Plan, results: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, Cost]:
    """Of single images where the plan has such a metric; maps of the cells of a grid share their passes."""
    by_image = sorted(plan.metrics, key=lambda entry: isinstance(entry.create(), GridMetric))
    found = ((method.label, results[method.label, by_image[0].label]) for method in plan.methods)
    return {label: Cost(one["passes"], one["map_seconds"]) for label, one in found}


def _left_out(results: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for (method, metric), one in results.items():
        reasons = [f"{count} x {reason}" for reason, count in one["reasons"].items()]
        if one["empty"]:
            reasons.append(f"{one['empty']} x shows nothing and counts as the worst")
        if reasons or not one["n"]:
            yield f"{method}, {metric}", f"n = {one['n']}, {'; '.join(reasons) or 'nothing to score'}"


def _differences(summary: Mapping[str, Any], model: str, metric: str) -> dict[tuple[str, str], dict[str, float]]:
    """By two methods, in both orders."""
    table = {}
    for one in summary["differences"]:
        if (one["model"], one["metric"]) == (model, metric) and one["mean"] is not None:
            first, second = one["first"], one["second"]
            table[first, second] = {name: one[name] for name in ("mean", "low", "high")}
            table[second, first] = {"mean": -one["mean"], "low": -one["high"], "high": -one["low"]}
    return table


def _curves(plan: Plan, collected: ModelScores) -> Iterator[Drawing]:
    from dave_vit.viz.plots import create_plots, draw_curves

    for entry in plan.metrics:
        table = collected.tables.get(entry.label)
        curves = table.mean_curves() if table else {}
        if curves:
            figure, (axes,) = create_plots(height=max(3.8, 0.26 * len(curves)), width=7.6)
            draw_curves(axes, curves, legends={name: name for name in curves})
            axes.set(xlabel=entry.create().axis, ylabel="mean over images", title=entry.label)
            yield figure
