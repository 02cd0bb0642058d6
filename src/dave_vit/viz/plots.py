"""Plots: one style for each method and model, one way to draw curves and bands of quartiles.

Other methods have the colours of Okabe and Ito, which colour-blind readers can distinguish; dashes and markers
differ as well.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from dave_vit.viz.figures import Drawing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MethodStyle:
    """Label, colour, dash and marker of a method in plots."""

    label: str
    colour: str
    dash: str = "-"
    marker: str = "o"

    @property
    def line(self) -> dict[str, Any]:
        """Options of a line of ``axes.plot``."""
        return {"label": self.label, "color": self.colour, "linestyle": self.dash, "marker": self.marker}


_TABLE = files("dave_vit.viz").joinpath("method_styles.csv").read_text(encoding="utf-8").splitlines()
STYLES = {row.pop("method"): MethodStyle(**row) for row in csv.DictReader(_TABLE)}
"""Styles by method: one hue for each family of methods, within it shades, dashes and markers differ."""
SERIES = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#222222")
"""Colours of models and estimators, in their order; violet is DAVE's."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))


def method_style(label: str) -> MethodStyle:
    """Return the style of a method; another label gets that of the longest method name it begins with, or grey."""
    prefixes = [name for name in STYLES if label.startswith(name)]
    if label in STYLES or not prefixes:
        return STYLES.get(label, MethodStyle(label, "#767676", ":", "x"))
    return replace(STYLES[max(prefixes, key=len)], label=label, dash="-.", marker="*")


def draw_curves(axes: Any, curves: Mapping[str, tuple[Floats, Floats]], legends: Mapping[str, str]) -> None:
    """Draw a line for each method, DAVE's the widest, and the legend beside the plot.

    Args:
        axes: of the plot.
        curves: positions and heights by the method's label.
        legends: text of the legend by label.
    """
    for label, (at, height) in curves.items():
        width = 2.4 if label.startswith("dave") else 1.4
        line = {**method_style(label).line, "label": legends[label], "linewidth": width, "markersize": 3.5}
        axes.plot(at, height, markevery=max(1, len(at) // 6), **line)
    add_legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


@dataclass(frozen=True)
class Band:
    """Median and quartiles over images at some points: [points] each."""

    at: Floats
    median: Floats
    low: Floats
    high: Floats

    def points(self) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield each point with its three numbers, by name."""
        for at, *numbers in zip(self.at, self.median, self.low, self.high, strict=True):
            yield float(at), dict(zip(("median", "low", "high"), map(float, numbers), strict=True))


def compute_quartiles(at: Sequence[float] | Floats, values: Floats) -> Band:
    """Return the band of values [images, points]; NaN is left out."""
    low, median, high = np.nanquantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75), axis=0)
    return Band(np.asarray(at, dtype=np.float64), median, low, high)


def create_plots(
    plots: int = 1, *, width: float = 6.4, height: float = 3.8, per_row: int = 3
) -> tuple[Drawing, list[Any]]:
    """Create an empty figure with plots beside each other; sizes are of one plot."""
    columns = min(plots, per_row)
    rows = -(-plots // columns)
    figure = Drawing(figsize=(width * columns, height * rows), layout="constrained")
    all_axes = [figure.add_subplot(rows, columns, place + 1) for place in range(plots)]
    for axes in all_axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, all_axes


def draw_band(axes: Any, band: Band, label: str, number: int, *, colour: str | None = None) -> None:
    """Draw the median as a line and the quartiles as a pale band."""
    shade = colour or SERIES[number % len(SERIES)]
    axes.fill_between(band.at, band.low, band.high, color=shade, alpha=0.16, linewidth=0)
    axes.plot(band.at, band.median, color=shade, linestyle=DASHES[number % len(DASHES)], linewidth=1.8, label=label)


def add_legend(axes: Any, **options: Any) -> None:
    """Add a legend without a frame."""
    axes.legend(frameon=False, fontsize=8.5, handlelength=2.8, **options)
