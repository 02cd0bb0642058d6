"""The look of all plots: one colour for each method and model, one way to draw a band of quartiles.

Rivals have the colours of Okabe and Ito, which colour-blind readers tell apart; dashes and markers differ as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dave_vit.viz import DAVE, Drawing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Style:
    """How a method is written and drawn."""

    words: str
    colour: str
    dash: str = "-"
    marker: str = "o"


STYLES = {
    "dave": Style("DAVE, default", DAVE, "-", "o"),
    "dave-paper": Style("DAVE, as in the paper", DAVE, "--", "D"),
    "input_x_gradient": Style("input x gradient", "#767676", ":", "s"),
    "integrated_gradients": Style("integrated gradients", "#0072b2", "-", "^"),
    "smoothgrad": Style("SmoothGrad", "#56b4e9", "--", "v"),
    "legrad": Style("LeGrad", "#e69f00", "-", "<"),
    "attn_lrp": Style("AttnLRP", "#009e73", "--", ">"),
    "chefer_lrp": Style("Chefer-LRP", "#d55e00", "-.", "P"),
    "bcos": Style("B-cos inherent", "#222222", "-", "X"),
    "effective": Style("effective transformation", "#5b3a8c", ":", "h"),
    "equivariant": Style("equivariant average", "#8a63b8", "-.", "p"),
}
SERIES = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#222222")
"""Colours of models and estimators, in their order; violet stays with DAVE."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))


def style(label: str) -> Style:
    """The style of a method; unknown ones are grey."""
    return STYLES.get(label, Style(label, "#999999", ":", "x"))


@dataclass(frozen=True)
class Band:
    """Median and quartiles over images at some points: [points] each."""

    at: Floats
    median: Floats
    low: Floats
    high: Floats


def quartiles(at: Sequence[float] | Floats, values: Floats) -> Band:
    """The band of values [images, points]; what is not finite is left out."""
    low, median, high = np.nanquantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75), axis=0)
    return Band(np.asarray(at, dtype=np.float64), median, low, high)


def canvas(plots: int = 1, *, width: float = 6.4, height: float = 3.8, per_row: int = 3) -> tuple[Drawing, list[Any]]:
    """An empty figure with plots beside each other, gridded, without upper and right edges; sizes are of one plot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    columns = min(plots, per_row)
    rows = -(-plots // columns)
    figure = Drawing(figsize=(width * columns, height * rows), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    made = [figure.add_subplot(rows, columns, place + 1) for place in range(plots)]
    for axes in made:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, made


def draw_band(axes: Any, band: Band, label: str, number: int, *, colour: str | None = None) -> None:
    """Median as a line, quartiles as a pale band."""
    shade = colour or SERIES[number % len(SERIES)]
    axes.fill_between(band.at, band.low, band.high, color=shade, alpha=0.16, linewidth=0)
    axes.plot(band.at, band.median, color=shade, linestyle=DASHES[number % len(DASHES)], linewidth=1.8, label=label)


def legend(axes: Any, **options: Any) -> None:
    """A legend without a frame."""
    axes.legend(frameon=False, fontsize=8.5, handlelength=2.8, **options)
