"""Curves of a run as SVG."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from dave_vit.bench.numbers.collect import Curve


def curves_svg(curves: Mapping[str, Curve], *, axis: str, title: str) -> str:
    """Mean curves of methods in one plot, to be put into a page."""
    from dave_vit.viz.plots import canvas, draw_curves

    figure, (plot,) = canvas(height=max(3.8, 0.26 * len(curves)), width=7.6)
    drawn = {name: (np.array(one.at), one.mean) for name, one in curves.items()}
    draw_curves(plot, drawn, words={name: name for name in curves})
    plot.set(xlabel=axis, ylabel="mean over images", title=title)
    return re.sub(r"^.*?(?=<svg)", "", figure.data("svg").decode(), flags=re.DOTALL)  # without the XML head
