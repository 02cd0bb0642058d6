"""How far a picture may be changed before the model changes its mind: what the analyses of rotation and noise share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit.analysis.base import flag
from dave_vit.analysis.inputs import AnalysisOptions, batches, image_count_flag, load_images
from dave_vit.engine.forward import logits_of
from dave_vit.errors import OptionError
from dave_vit.viz import Drawing
from dave_vit.viz.plots import SERIES, Band, Floats, add_legend, compute_quartiles, create_plots, draw_band
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section

TOLERANCE = 0.1
_BATCH = 16
Change = Callable[[Tensor, float], Tensor]


def sensitivity(model: nn.Module, inputs: Tensor, target: Tensor, points: Sequence[float], change: Change) -> Floats:
    """Absolute change of the target's probability at each point: [B, points].

    Args:
        model: maps inputs to logits.
        inputs: [B,C,H,W].
        target: [B].
        points: angles or noise levels; at 0 nothing changes.
        change: from inputs and a point to changed inputs.
    """
    clean = _probability(model, inputs, target)
    moved = [
        torch.zeros_like(clean) if point == 0 else (_probability(model, change(inputs, point), target) - clean).abs()
        for point in points
    ]
    return np.asarray(torch.stack(moved, 1).cpu().double().numpy())


def _probability(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    return logits_of(model, inputs).float().softmax(1).gather(1, target[:, None])[:, 0]


def stable_range(band: Band, tolerance: float = TOLERANCE) -> float:
    """The largest distance from 0 up to which the median change stays within the tolerance, on both sides.

    The paper chooses its rotations by looking for the interval in which probabilities change little; this is that rule
    with a number in it.
    """
    if not 0 < tolerance < 1:
        raise OptionError(f"tolerance {tolerance}; expected a change of probability between 0 and 1")
    reach = 0.0
    for distance in sorted(set(np.abs(band.at).tolist())):
        if (band.median[np.abs(band.at) == distance] > tolerance).any():
            break
        reach = distance
    return float(reach)


@dataclass(frozen=True)
class SensitivityOptions(AnalysisOptions):
    """Options of both analyses.

    Attributes:
        tolerance: change of probability that is still called small.
    """

    n: int = image_count_flag(16)
    tolerance: float = flag(TOLERANCE, "Change of probability that is still called small.")


@dataclass(frozen=True)
class SensitivityStudy:
    """In what the two analyses differ.

    Attributes:
        name: of the analysis.
        title: of its section.
        axis: what is changed.
        unit: of that.
        text: of the section, with a place for the tolerance.
        change: from a model to what changes its inputs.
        shown: points of which the table tells the median.
        also: a further column of the table: its head, and a number for the end of the range.
        mark: draws what else belongs into the plot.
    """

    name: str
    title: str
    axis: str
    unit: str
    text: str
    change: Callable[[nn.Module], Change]
    shown: tuple[float, ...]
    also: tuple[str, Callable[[float], float]] | None = None
    mark: Callable[[Any], None] = lambda axes: None


def sensitivity_section(options: SensitivityOptions, kind: SensitivityStudy, points: Sequence[float]) -> Section:
    """The change of the probability at some points, for all models of the options."""
    bands: dict[str, Band] = {}
    images = 0
    for label, model in options.load():
        shown = load_images(model, options)
        images = len(shown)
        parts = [sensitivity(model, *batch, points, kind.change(model)) for batch in batches(shown, _BATCH)]
        bands[label] = compute_quartiles(points, np.concatenate(parts))
    reach = {label: stable_range(band, options.tolerance) for label, band in bands.items()}
    facts = options.facts(images=images, points=len(points), tolerance=options.tolerance)
    figure = _figure(kind, bands, reach, options.tolerance)
    rows: list[dict[str, Number]] = [
        {"model": label, kind.unit: at, **numbers} for label, band in bands.items() for at, numbers in band.points()
    ]
    picture = ReportFigure(kind.name, figure, "Median over images; bands are quartiles.")
    text = kind.text.format(tolerance=options.tolerance)
    return Section(kind.name, kind.title, text, facts, [_table(kind, bands, reach)], rows, [picture])


def _figure(kind: SensitivityStudy, bands: Mapping[str, Band], reach: Mapping[str, float], tolerance: float) -> Drawing:
    figure, (axes,) = create_plots(width=7.2)
    for number, (label, band) in enumerate(bands.items()):
        ends = (max(-reach[label], float(band.at.min())), reach[label])
        axes.axvspan(*ends, color=SERIES[number % len(SERIES)], alpha=0.10, linewidth=0)
        draw_band(axes, band, f"{label}: within {reach[label]:g} {kind.unit}", number)
    axes.axhline(tolerance, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)), label=f"tolerance {tolerance:g}")
    kind.mark(axes)
    axes.set(xlabel=kind.axis, ylabel="change of the probability", ylim=(-0.02, 1.02))
    add_legend(axes, loc="upper center", ncols=2, bbox_to_anchor=(0.5, 1.2))
    return figure


def _table(kind: SensitivityStudy, bands: Mapping[str, Band], reach: Mapping[str, float]) -> ReportTable:
    rows = []
    for label, band in bands.items():
        medians = (float(np.interp(point, band.at, band.median)) for point in kind.shown)
        also = (f"{kind.also[1](reach[label]):.2f}",) if kind.also else ()
        rows.append((label, f"{reach[label]:g}", *also, *(f"{median:.3f}" for median in medians)))
    also_head = (kind.also[0],) if kind.also else ()
    heads = (f"median at {point:g}" for point in kind.shown)
    return ReportTable(("model", f"within tolerance ({kind.unit})", *also_head, *heads), tuple(rows))
