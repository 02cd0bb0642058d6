"""Plots: one style for each method and model, one way to draw curves and bands of quartiles.

Other methods have the colours of Okabe and Ito, which colour-blind readers can distinguish; dashes and markers
differ as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb

from dave_vit.viz.colors import DAVE
from dave_vit.viz.figures import Drawing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MethodStyle:
    """Label, colour, dash and marker of a method in plots."""

    label: str
    colour: str
    dash: str = "-"
    marker: str = "o"


_BLUE, _SKY, _GREEN, _ORANGE, _RED, _PINK, _GREY, _BLACK = (
    "#0072b2 #56b4e9 #009e73 #e69f00 #d55e00 #cc79a7 #767676 #222222".split()
)
# One hue for each family of methods; within a family shades, dashes and markers differ.
STYLES = {
    "dave": MethodStyle("DAVE, default", DAVE, "-", "o"),
    "dave-paper": MethodStyle("DAVE, as in the paper", DAVE, "--", "D"),
    "dave-official": MethodStyle("DAVE, as in the authors' code", DAVE, ":", "s"),
    "equivariant": MethodStyle("equivariant average", "#8a63b8", "-.", "p"),
    "effective": MethodStyle("effective transformation", "#5b3a8c", ":", "h"),
    "integrated_gradients": MethodStyle("integrated gradients", _BLUE, "-", "^"),
    "saliency": MethodStyle("saliency", _BLUE, ":", "s"),
    "expected_gradients": MethodStyle("expected gradients", _BLUE, "--", "p"),
    "fullgrad": MethodStyle("FullGrad", _BLUE, "-.", "d"),
    "smoothgrad": MethodStyle("SmoothGrad", _SKY, "--", "v"),
    "guided_backprop": MethodStyle("guided backpropagation", _SKY, "-", "<"),
    "deconvolution": MethodStyle("deconvolution", _SKY, ":", ">"),
    "attn_lrp": MethodStyle("AttnLRP", _GREEN, "--", ">"),
    "cp_lrp": MethodStyle("CP-LRP", _GREEN, "-", "<"),
    "omenn": MethodStyle("OMENN", _GREEN, ":", "o"),
    "libragrad": MethodStyle("LibraGrad", _GREEN, "-.", "D"),
    "legrad": MethodStyle("LeGrad", _ORANGE, "-", "<"),
    "gradcam": MethodStyle("Grad-CAM", _ORANGE, "--", "s"),
    "gradcam_plus_plus": MethodStyle("Grad-CAM++", _ORANGE, ":", "D"),
    "layercam": MethodStyle("LayerCAM", _ORANGE, "-", "v"),
    "hirescam": MethodStyle("HiResCAM", _ORANGE, "--", "p"),
    "scorecam": MethodStyle("Score-CAM", _ORANGE, "-.", "h"),
    "eigencam": MethodStyle("EigenCAM", _ORANGE, ":", "P"),
    "ablationcam": MethodStyle("Ablation-CAM", _ORANGE, "-", "X"),
    "finercam": MethodStyle("Finer-CAM", _ORANGE, "--", "^"),
    "iia": MethodStyle("IIA", _ORANGE, "-.", "^"),
    "chefer_lrp": MethodStyle("Chefer-LRP", _RED, "-.", "P"),
    "chefer_generic": MethodStyle("Chefer, generic", _RED, "-", "X"),
    "beyond_intuition": MethodStyle("Beyond Intuition", _RED, "-.", "D"),
    "rollout": MethodStyle("attention rollout", _PINK, "-", "o"),
    "raw_attention": MethodStyle("raw attention", _PINK, "--", "s"),
    "attention_flow": MethodStyle("attention flow", _PINK, ":", "^"),
    "occlusion": MethodStyle("occlusion", _RED, ":", "s"),
    "rise": MethodStyle("RISE", _RED, "--", "o"),
    "lime": MethodStyle("LIME", _RED, "-", "v"),
    "kernel_shap": MethodStyle("Kernel SHAP", _RED, "--", "d"),
    "vit_cx": MethodStyle("ViT-CX", _PINK, "-.", "D"),
    "mda": MethodStyle("MDA", _PINK, "-", "P"),
    "tis": MethodStyle("TIS", _PINK, "--", "v"),
    "tam": MethodStyle("TAM", _PINK, ":", "d"),
    "greedy": MethodStyle("greedy order", _BLACK, "--", "d"),
    "input_x_gradient": MethodStyle("input x gradient", _GREY, ":", "s"),
    "random": MethodStyle("random", _GREY, "--", "x"),
    "bcos": MethodStyle("B-cos inherent", _BLACK, "-", "X"),
    "center": MethodStyle("centre", _BLACK, ":", "+"),
}


def _shade_families(styles: dict[str, MethodStyle]) -> dict[str, MethodStyle]:
    """Give each member of a family its own shade, so that no two methods share a colour; DAVE's presets share one."""
    shaded = dict(styles)
    for colour in {style.colour for style in styles.values()} - {DAVE}:
        family = [name for name, style in styles.items() if style.colour == colour]
        for place, name in enumerate(family):
            shaded[name] = replace(styles[name], colour=_shade(colour, place, len(family)))
    return shaded


def _shade(colour: str, place: int, count: int) -> str:
    """Return the hue for the first of a family, then darker and lighter shades in turn; black only gets lighter."""
    hue = np.array(to_rgb(colour))
    dark = hue.mean() < 0.2
    part = 0.75 * (place / count if dark else ((place + 1) // 2) / (count // 2 + 1))
    towards = np.ones(3) if dark or place % 2 == 0 else np.zeros(3)
    return to_hex((1 - part) * hue + part * towards)


STYLES = _shade_families(STYLES)
SERIES = (_BLUE, _ORANGE, _GREEN, _RED, _SKY, _BLACK)
"""Colours of models and estimators, in their order; violet is DAVE's."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))


def method_style(label: str) -> MethodStyle:
    """Return the style of a method; another label gets that of the longest method name it begins with, or grey."""
    prefixes = [name for name in STYLES if label.startswith(name)]
    if label in STYLES or not prefixes:
        return STYLES.get(label, MethodStyle(label, _GREY, ":", "x"))
    return replace(STYLES[max(prefixes, key=len)], label=label, dash="-.", marker="*")


def draw_curves(axes: Any, curves: Mapping[str, tuple[Floats, Floats]], legends: Mapping[str, str]) -> None:
    """Draw a line for each method, DAVE's the widest, and the legend beside the plot.

    Args:
        axes: of the plot.
        curves: positions and heights by the method's label.
        legends: text of the legend by label.
    """
    for label, (at, height) in curves.items():
        style = method_style(label)
        axes.plot(
            at,
            height,
            label=legends[label],
            color=style.colour,
            linestyle=style.dash,
            linewidth=2.4 if label.startswith("dave") else 1.4,
            marker=style.marker,
            markersize=3.5,
            markevery=max(1, len(at) // 6),
        )
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
    figure = Drawing(figsize=(width * columns, height * rows), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
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
