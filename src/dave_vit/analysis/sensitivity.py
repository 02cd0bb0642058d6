"""How far a picture may be turned or noised before the model changes its mind: what the neighbourhood may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit.analysis.section import Number, Picture, Section, Table
from dave_vit.analysis.subjects import Setting, batches, load, pictures
from dave_vit.errors import OptionError
from dave_vit.models import traits_of
from dave_vit.neighborhood import Warp, affine_matrix
from dave_vit.neighborhood.draws import sample_generator
from dave_vit.run.gradient import logits_of
from dave_vit.viz import Drawing
from dave_vit.viz.plots import SERIES, Band, Floats, canvas, draw_band, legend, quartiles

ANGLES = tuple(float(angle) for angle in range(-180, 181, 10))
SIGMAS = tuple(round(0.1 * step, 1) for step in range(21))
TOLERANCE = 0.1
PAPER_ANGLE = 20.0
_BATCH = 16
Change = Callable[[Tensor, float], Tensor]


def turned(inputs: Tensor, angle: float, *, fill: float = 0.0) -> Tensor:
    """Images turned about their centre by degrees, with a colour outside: [B,C,H,W] -> [B,C,H,W]."""
    one = torch.ones(1, dtype=torch.float64)
    size = (inputs.shape[2], inputs.shape[3])
    matrix = affine_matrix(
        size, flip=one < 0, rotation=one * angle, scale=one, translation=torch.zeros(1, 2, dtype=torch.float64)
    )
    warp = Warp(matrix.expand(len(inputs), 3, 3), torch.zeros(len(inputs), 2, dtype=torch.int64))
    return warp.apply(inputs, fill=fill)


def noised(inputs: Tensor, sigma: float, seed: int = 0) -> Tensor:
    """Images with additive Gaussian noise; the same draw for all images and all levels: [B,C,H,W] -> [B,C,H,W]."""
    eps = torch.randn(inputs.shape[1:], generator=sample_generator(seed, 0, "noise"))
    return inputs + sigma * eps.to(inputs)


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


def time_of(sigma: float) -> float:
    """The t of variance-preserving noise whose ratio of noise to signal is that of additive noise."""
    return float(1 - 1 / np.sqrt(1 + sigma**2))


@dataclass(frozen=True)
class _Kind:
    """Words of one of the two analyses."""

    name: str
    title: str
    axis: str
    unit: str
    text: str


_ROTATION = _Kind(
    "rotation",
    "Rotation sensitivity",
    "rotation in degrees",
    "degrees",
    "Absolute change of the target's probability when the picture is turned about its centre, with grey outside "
    "(the mean colour of the training data, or half of every channel where zero is no colour). Shaded per model: the "
    "widest interval around 0 in which the median stays within {tolerance:g}. Dotted: the paper's choice, 20 degrees.",
)
_NOISE = _Kind(
    "noise",
    "Noise sensitivity",
    "standard deviation of additive noise (preprocessed input)",
    "sigma",
    "Absolute change of the target's softmax probability under additive Gaussian noise on the preprocessed input. "
    "Shaded per model: the levels at which the median stays within {tolerance:g}; the table gives the t of "
    "variance-preserving noise with the same ratio of noise to signal.",
)


def rotation_section(setting: Setting, *, angles: Sequence[float] = ANGLES, tolerance: float = TOLERANCE) -> Section:
    """Rotation sensitivity of all models of a setting."""

    def change(model: nn.Module) -> Change:
        return partial(turned, fill=traits_of(model).fill)

    return _section(setting, _ROTATION, angles, change, tolerance)


def noise_section(setting: Setting, *, sigmas: Sequence[float] = SIGMAS, tolerance: float = TOLERANCE) -> Section:
    """Noise sensitivity of all models of a setting."""

    def change(model: nn.Module) -> Change:
        return partial(noised, seed=setting.seed)

    return _section(setting, _NOISE, sigmas, change, tolerance)


def _section(
    setting: Setting, kind: _Kind, points: Sequence[float], changes: Callable[[nn.Module], Change], tolerance: float
) -> Section:
    found: dict[str, Band] = {}
    count = 0
    for entry in setting.models:
        model = load(entry, setting.device)
        shown = pictures(model, setting)
        count = len(shown)
        parts = [sensitivity(model, *batch, points, changes(model)) for batch in batches(shown, _BATCH)]
        found[entry.label] = quartiles(points, np.concatenate(parts))
    reach = {label: stable_range(band, tolerance) for label, band in found.items()}
    facts = setting.facts(images=count, points=len(points), tolerance=tolerance)
    picture = Picture(kind.name, _figure(kind, found, reach, tolerance), "Median over images; bands are quartiles.")
    table = _table(kind, found, reach)
    text = kind.text.format(tolerance=tolerance)
    return Section(kind.name, kind.title, text, facts, [table], _rows(kind, found), [picture])


def _figure(kind: _Kind, found: Mapping[str, Band], reach: Mapping[str, float], tolerance: float) -> Drawing:
    figure, (axes,) = canvas(width=7.2)
    for number, (label, band) in enumerate(found.items()):
        ends = (max(-reach[label], float(band.at.min())), reach[label])
        axes.axvspan(*ends, color=SERIES[number % len(SERIES)], alpha=0.10, linewidth=0)
        draw_band(axes, band, f"{label}: within {reach[label]:g} {kind.unit}", number)
    axes.axhline(tolerance, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)), label=f"tolerance {tolerance:g}")
    if kind is _ROTATION:
        for end, words in ((-PAPER_ANGLE, None), (PAPER_ANGLE, "the paper's choice")):
            axes.axvline(end, color="#555555", linewidth=1.0, linestyle=":", label=words)
        axes.set_xticks(range(-180, 181, 60))
    axes.set(xlabel=kind.axis, ylabel="change of the probability", ylim=(-0.02, 1.02))
    legend(axes, loc="upper center", ncols=2, bbox_to_anchor=(0.5, 1.2))
    return figure


def _table(kind: _Kind, found: Mapping[str, Band], reach: Mapping[str, float]) -> Table:
    rows = []
    for label, band in found.items():
        at = [float(np.interp(point, band.at, band.median)) for point in _shown_points(kind)]
        more = (f"{time_of(reach[label]):.2f}",) if kind is _NOISE else ()
        rows.append((label, f"{reach[label]:g}", *more, *(f"{value:.3f}" for value in at)))
    more_head = ("as t",) if kind is _NOISE else ()
    heads = (f"median at {point:g}" for point in _shown_points(kind))
    return Table(("model", f"within tolerance ({kind.unit})", *more_head, *heads), tuple(rows))


def _shown_points(kind: _Kind) -> tuple[float, ...]:
    return (0.2, 0.5, 1.0, 2.0) if kind is _NOISE else (10.0, 20.0, 90.0, 180.0)


def _rows(kind: _Kind, found: Mapping[str, Band]) -> list[dict[str, Number]]:
    rows: list[dict[str, Number]] = []
    for label, band in found.items():
        for at, median, low, high in zip(band.at, band.median, band.low, band.high, strict=True):
            numbers = {"median": float(median), "low": float(low), "high": float(high)}
            rows.append({"model": label, kind.unit: float(at), **numbers})
    return rows
