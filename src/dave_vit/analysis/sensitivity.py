"""How far an image may be rotated, and how much noise it takes, before the model's prediction changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit.analysis.inputs import AnalysisOptions, analysis, count_flag, flag
from dave_vit.engine.forward import compute_logits
from dave_vit.errors import OptionError
from dave_vit.metrics.perturbation import class_score
from dave_vit.metrics.stability import small_warp, warp_images
from dave_vit.models import traits_of
from dave_vit.neighborhood.draws import sample_generator
from dave_vit.viz.figures import Drawing
from dave_vit.viz.plots import SERIES, Band, Floats, add_legend, compute_quartiles, create_plots, draw_band
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section

TOLERANCE = 0.1
_BATCH = 16
Change = Callable[[Tensor, float], Tensor]


def sensitivity(model: nn.Module, inputs: Tensor, target: Tensor, points: Sequence[float], change: Change) -> Floats:
    """Measure the absolute change of the target's probability at each point: [B, points].

    Args:
        model: maps inputs to logits.
        inputs: [B,C,H,W].
        target: [B].
        points: angles or noise levels; at 0 nothing changes.
        change: function from inputs and a point to changed inputs.
    """

    def probability(images: Tensor) -> Tensor:
        return class_score(compute_logits(model, images), target, "probability")

    clean = probability(inputs)
    changes = [
        torch.zeros_like(clean) if point == 0 else (probability(change(inputs, point)) - clean).abs()
        for point in points
    ]
    return np.asarray(torch.stack(changes, 1).cpu().double().numpy())


def stable_range(band: Band, tolerance: float = TOLERANCE) -> float:
    """Return the largest distance from 0 up to which the median change stays within the tolerance, on both sides.

    The paper chooses its rotations by looking for the interval in which probabilities change little; this is that rule
    with a number in it.
    """
    if not 0 < tolerance < 1:
        raise OptionError(f"tolerance {tolerance}; expected a change of probability between 0 and 1")
    distance = np.abs(band.at)
    first_unstable = distance[band.median > tolerance].min(initial=np.inf)
    return float(distance[distance < first_unstable].max(initial=0.0))


@dataclass(frozen=True)
class SensitivityOptions(AnalysisOptions):
    """Options of both analyses.

    Attributes:
        tolerance: change of probability that counts as small.
    """

    n: int = count_flag(16)
    tolerance: float = flag(TOLERANCE, "Change of probability that counts as small.")


@dataclass(frozen=True)
class SensitivityStudy:
    """What differs between the two analyses.

    Attributes:
        name: name of the analysis.
        axis: label of the quantity that is changed.
        unit: unit of that quantity.
        text: text of the section, with a placeholder for the tolerance.
        change: function from a model to the function that changes its inputs.
        table_points: points whose median the table shows.
        extra_columns: further columns of the table: functions of the stable range, by the column's title.
        annotate: draws further things into the plot.
    """

    name: str
    axis: str
    unit: str
    text: str
    change: Callable[[nn.Module], Change]
    table_points: tuple[float, ...]
    extra_columns: Mapping[str, Callable[[float], float]] = field(default_factory=dict)
    annotate: Callable[[Any], None] = lambda axes: None


def run_study(options: SensitivityOptions, study: SensitivityStudy, points: Sequence[float]) -> Section:
    """Measure the change of the probability at some points, for all models of the options."""
    bands: dict[str, Band] = {}
    for label, model, images in options.load_with_images():
        parts = [sensitivity(model, *batch, points, study.change(model)) for batch in images.batches(_BATCH)]
        bands[label] = compute_quartiles(points, np.concatenate(parts))
    ranges = {label: stable_range(band, options.tolerance) for label, band in bands.items()}
    facts = options.facts(images=len(images), points=len(points), tolerance=options.tolerance)
    drawing = _draw(study, bands, ranges, options.tolerance)
    figure = ReportFigure(study.name, drawing, "Median over images; bands are quartiles.")
    rows: list[dict[str, Number]] = [
        {"model": label, study.unit: at, **numbers} for label, band in bands.items() for at, numbers in band.points()
    ]
    text = study.text.format(tolerance=options.tolerance)
    title, tables = f"{study.name.capitalize()} sensitivity", [_table(study, bands, ranges)]
    return Section(study.name, title, text, facts, tables, rows, [figure])


def _draw(study: SensitivityStudy, bands: Mapping[str, Band], ranges: Mapping[str, float], tolerance: float) -> Drawing:
    figure, (axes,) = create_plots(width=7.2)
    for index, (label, band) in enumerate(bands.items()):
        ends = (max(-ranges[label], float(band.at.min())), ranges[label])
        axes.axvspan(*ends, color=SERIES[index % len(SERIES)], alpha=0.10, linewidth=0)
        draw_band(axes, band, f"{label}: within {ranges[label]:g} {study.unit}", index)
    axes.axhline(tolerance, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)), label=f"tolerance {tolerance:g}")
    study.annotate(axes)
    axes.set(xlabel=study.axis, ylabel="change of the probability", ylim=(-0.02, 1.02))
    add_legend(axes, loc="upper center", ncols=2, bbox_to_anchor=(0.5, 1.2))
    return figure


def _table(study: SensitivityStudy, bands: Mapping[str, Band], ranges: Mapping[str, float]) -> ReportTable:
    rows = []
    for label, band in bands.items():
        extra = (f"{convert(ranges[label]):.2f}" for convert in study.extra_columns.values())
        medians = (f"{np.interp(point, band.at, band.median):.3f}" for point in study.table_points)
        rows.append((label, f"{ranges[label]:g}", *extra, *medians))
    heads = (*study.extra_columns, *(f"median at {point:g}" for point in study.table_points))
    return ReportTable(("model", f"within tolerance ({study.unit})", *heads), tuple(rows))


PAPER_ANGLE = 20.0


@dataclass(frozen=True)
class RotationOptions(SensitivityOptions):
    """Options of the analysis.

    Attributes:
        step: degrees between angles.
    """

    step: float = flag(10.0, "Degrees between angles.", least=1, most=90)


@analysis("rotation")
def analyze_rotation(options: RotationOptions) -> Section:
    """Measure how the probability changes when images are rotated, and the interval in which it hardly does."""
    study = SensitivityStudy(
        "rotation",
        "rotation in degrees",
        "degrees",
        "Absolute change of the target's probability when the image is rotated about its centre, with grey outside "
        "(the mean colour of the training data, or half of every channel where zero is not a colour). Shaded per "
        "model: the widest interval around 0 in which the median stays within {tolerance:g}. Dotted: the paper's "
        "choice, 20 degrees.",
        lambda model: partial(rotate_images, fill=traits_of(model).fill),
        table_points=(10.0, 20.0, 90.0, 180.0),
        annotate=_mark_paper_angle,
    )
    right = np.arange(0, 180 + options.step / 2, options.step, dtype=np.float64)
    return run_study(options, study, [*(-right[:0:-1]).tolist(), *right.tolist()])


def rotate_images(inputs: Tensor, angle: float, *, fill: float = 0.0) -> Tensor:
    """Rotate images about their centre by degrees, with a colour outside: [B,C,H,W] -> [B,C,H,W]."""
    warp = small_warp((inputs.shape[2], inputs.shape[3]), rotation=angle, shift=(0.0, 0.0))
    return warp_images(inputs, warp, fill=fill)


def _mark_paper_angle(axes: Any) -> None:
    for angle, label in ((-PAPER_ANGLE, None), (PAPER_ANGLE, "the paper's choice")):
        axes.axvline(angle, color="#555555", linewidth=1.0, linestyle=":", label=label)
    axes.set_xticks(range(-180, 181, 60))


@dataclass(frozen=True)
class NoiseOptions(SensitivityOptions):
    """Options of the analysis.

    Attributes:
        step: distance of levels of noise, which go up to 2.
    """

    step: float = flag(0.1, "Distance of levels of noise.", least=0.01, most=2)


@analysis("noise")
def analyze_noise(options: NoiseOptions) -> Section:
    """Measure how the probability changes under additive noise, and the level up to which it hardly does."""
    study = SensitivityStudy(
        "noise",
        "standard deviation of additive noise (preprocessed input)",
        "sigma",
        "Absolute change of the target's softmax probability under additive Gaussian noise on the preprocessed input. "
        "Shaded per model: the levels at which the median stays within {tolerance:g}; the table gives the t of "
        "variance-preserving noise with the same ratio of noise to signal.",
        lambda model: partial(add_noise, seed=options.seed),
        table_points=(0.2, 0.5, 1.0, 2.0),
        extra_columns={"as t": equivalent_noise_time},
    )
    return run_study(options, study, np.arange(0, 2 + options.step / 2, options.step).round(4).tolist())


def add_noise(inputs: Tensor, sigma: float, seed: int = 0) -> Tensor:
    """Add Gaussian noise to images, the same draw for all images and all levels: [B,C,H,W] -> [B,C,H,W]."""
    return inputs + sigma * torch.randn(inputs.shape[1:], generator=sample_generator(seed, 0, "noise")).to(inputs)


def equivalent_noise_time(sigma: float) -> float:
    """Return the t of variance-preserving noise with the same ratio of noise to signal as additive noise."""
    return float(1 - 1 / np.sqrt(1 + sigma**2))
