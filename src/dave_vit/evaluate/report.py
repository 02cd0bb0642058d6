"""The report of a run: tables, differences, curves and example maps of each model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import MetricEntry
from dave_vit.evaluate.statistics.intervals import describe_comparisons, excludes_zero
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.evaluate.statistics.scores import ModelScores, rank_columns
from dave_vit.evaluate.statistics.summary import Result, build_results_table, format_title
from dave_vit.evaluate.store import reading
from dave_vit.methods.options import declared_options, max_samples
from dave_vit.metrics import GridMetric
from dave_vit.viz.colors import Array
from dave_vit.viz.figures import Drawing
from dave_vit.viz.pages import render
from dave_vit.viz.plots import create_plots, draw_curves
from dave_vit.viz.rendering import as_image, overlay, to_pillow
from dave_vit.viz.report_section import TableCell

_MAX_OPEN = 8  # with more methods the tables of differences are folded
_PLACES = ("best", "median", "worst")
_EXAMPLE_METRICS = ("energypg", "deletion", "insertion")  # the first one of the plan ranks the examples


@dataclass(frozen=True)
class Example:
    """A map in the report: its method, its place among the method's scores, the image, the score and the file."""

    method: str
    place: str
    image: ScannedImage
    value: float
    path: Path

    def read(self) -> list[Any]:
        """Return image, map and region."""
        with np.load(self.path) as arrays:
            return [arrays[f"{name}-{self.image.index}"] for name in ("image", "map", "region")]

    def pictures(self) -> tuple[Image.Image, Image.Image]:
        """Draw the image, and the map over it, with the object's region outlined."""
        image, heat, region = self.read()
        return _outline(as_image(image), region), _outline(overlay(image, np.nan_to_num(heat)), region)


def check_examples(examples: Iterable[Example]) -> None:
    """Raise `DamagedFile` if a map cannot be read."""
    for example in examples:
        with reading(example.path):
            example.read()


def _outline(colours: Array, region: npt.NDArray[np.bool_]) -> Image.Image:
    """Return a picture with the edge of the region in white."""
    from scipy.ndimage import binary_erosion  # type: ignore[import-untyped]

    return to_pillow(np.where((region & ~binary_erosion(region))[..., None], 1.0, colours))


def select_example_metric(plan: Plan) -> MetricEntry | None:
    """Return the metric whose scores rank the examples, if the plan has one of single images."""
    entries = [entry for entry in plan.metrics if not isinstance(entry.create(), GridMetric)]
    preference = {name: place for place, name in enumerate(_EXAMPLE_METRICS)}
    return min(entries, key=lambda entry: preference.get(entry.metric, len(preference)), default=None)


def select_examples(plan: Plan, scores: ModelScores) -> Iterator[dict[str, tuple[str, float]]]:
    """Yield for each method, by place: the image on which it scores best, in the middle and worst, and its score."""
    entry = select_example_metric(plan)
    table = scores.tables.get(entry.label) if entry else None
    if entry is None or table is None:
        return
    for row in table.values:
        order = rank_columns(row, higher_is_better=entry.create().higher_is_better).tolist()
        picks = dict(zip((0, len(order) // 2, len(order) - 1), _PLACES, strict=False)) if order else {}
        yield {place: (table.images[order[k]], float(row[order[k]])) for k, place in picks.items()}


def build_model_report(
    plan: Plan, summary: Mapping[str, Any], model: str, scores: ModelScores, examples: Iterable[Example]
) -> dict[str, Any]:
    """Return what the templates show of a model: tables, differences of methods, a plot per curve, examples."""
    results = [one for one in summary["results"] if one["model"] == model]
    own = [one for one in summary["differences"] if one["model"] == model]
    differences = _tabulate_differences(own)
    return {
        "model": model,
        "methods": [method.label for method in plan.methods],
        "table": build_results_table(plan, results, model),
        "left_out": list(_describe_left_out(results)),
        "differences": {format_title(one): differences[one.label] for one in plan.metrics if one.label in differences},
        "comparisons": describe_comparisons(own),
        "curves": list(_draw_curves(plan, scores)),
        "examples": {name: list(own) for name, own in groupby(examples, lambda example: example.method)},
    }


def render_report(plan: Plan, summary: Mapping[str, Any], reports: Sequence[dict[str, Any]]) -> dict[str, bytes]:
    """Render the report in Markdown, and as one HTML file with differences, curves and examples."""
    example_metric = select_example_metric(plan)
    content = {
        "title": "dave evaluate",
        "heading": "Evaluation",
        "facts": _list_facts(plan, summary),
        "notes": summary["notes"],
        "skipped": summary["skipped"],
        "reports": reports,
        "few": _MAX_OPEN,
        "example_metric": example_metric.label if example_metric else "",
    }
    return {f"report.{kind}": render(f"run.{kind}", **content).encode() for kind in ("md", "html")}


def _list_facts(plan: Plan, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was run, as names and texts; those without a text are left out."""
    smoothing, least = plan.smoothing, plan.min_confidence
    window = f" ({smoothing.size} pixels)" if smoothing.kind in ("mean", "gaussian") else ""
    only = "" if least is None else f", only if classified correctly with more than {least:g}"
    against = [f"{method.label} against {method.against}" for method in plan.methods if method.against is not None]
    prepared = [f"{model.label} {' '.join(model.prepare.flags)}" for model in plan.models if model.prepare]
    facts = {
        "command": summary["command"],
        "data": f"{plan.data}: {summary['images']} images",
        "weights": "; ".join(_describe_weights(plan, summary["weights"])),
        "samples": ", ".join(_describe_samples(plan)) or "no method draws any",
        "explained class": "; ".join([plan.target + only, *([", ".join(against)] if against else [])]),
        "preprocessing": "; ".join(prepared),
        "smoothing of maps": f"{smoothing.kind}{window}",
        "seeds": ", ".join(map(str, plan.seeds)),
        "device": ", ".join(summary["devices"]),
        "versions": "; ".join(summary["versions"]),
    }
    return [(name, text) for name, text in facts.items() if text]


def _describe_weights(plan: Plan, digests: Mapping[str, str]) -> Iterator[str]:
    """Yield for each model the file of its weights, if one was given, and their hash."""
    for model in plan.models:
        name = model.label if model.label == model.spec else f"{model.label} ({model.spec})"
        content = f", content {digests[model.label]}" if model.label in digests else ""
        yield f"{name}: {Path(model.weights).name if model.weights else 'its own'}{content}"


def _describe_samples(plan: Plan) -> Iterator[str]:
    """Yield the number of samples of each method that draws any."""
    for method in plan.methods:
        if "samples" in declared_options(method.method):
            most = max_samples(method.method, method.options)
            yield f"{method.label} {'at most ' if method.options.get('samples') == 'auto' else ''}{most}"


def _describe_left_out(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    for one in results:
        reasons = [f"{count} x {reason}" for reason, count in one["reasons"].items()]
        if one["empty"]:
            reasons.append(f"{one['empty']} x shows nothing and counts as the worst")
        if reasons or not one["n"]:
            yield f"{one['method']}, {one['metric']}", f"n = {one['n']}, {'; '.join(reasons) or 'nothing to score'}"


def _tabulate_differences(differences: Iterable[Result]) -> dict[str, dict[tuple[str, str], TableCell]]:
    """Return by metric, and by two methods in both orders, the difference of their means."""
    tables: dict[str, dict[tuple[str, str], TableCell]] = {}
    for one in differences:
        if one["mean"] is not None:
            table, first, second = tables.setdefault(one["metric"], {}), one["first"], one["second"]
            table[first, second] = _format_difference(one, one["mean"], one["low"], one["high"])
            reverse = (None, None) if one["low"] is None else (-one["high"], -one["low"])
            table[second, first] = _format_difference(one, -one["mean"], *reverse)
    return tables


def _format_difference(result: Result, mean: float, low: float | None, high: float | None) -> TableCell:
    """Return a cell that is marked if the interval excludes zero."""
    return TableCell(f"{mean:+.3f}", "" if low is None else f"{low:+.3f} to {high:+.3f}", excludes_zero(result))


def _draw_curves(plan: Plan, scores: ModelScores) -> Iterator[Drawing]:
    for entry in plan.metrics:
        table = scores.tables.get(entry.label)
        curves = table.mean_curves() if table else {}
        if curves:
            figure, (axes,) = create_plots(height=max(3.8, 0.26 * len(curves)), width=7.6)
            draw_curves(axes, curves, legends={name: name for name in curves})
            axes.set(xlabel=entry.create().axis, ylabel="mean over images", title=entry.label)
            yield figure
