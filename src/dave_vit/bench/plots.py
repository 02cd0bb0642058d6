"""Curves of a run as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

from dave_vit.bench.collect import Curve


def curves_svg(curves: Mapping[str, Curve], *, axis: str, title: str) -> str:
    """Mean curves of methods in one plot, to be put into a page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from dave_vit.viz import method_color

    names = list(curves)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        plot = figure.add_subplot()
        for name, curve in curves.items():
            width = 2.4 if name == "dave" else 1.4
            plot.plot(curve.at, curve.mean, label=name, color=method_color(name, names), linewidth=width)
        plot.set(xlabel=axis, ylabel="mean over images", title=title)
        plot.grid(alpha=0.3)
        plot.spines[["top", "right"]].set_visible(False)
        plot.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue().decode(), flags=re.DOTALL)  # without the XML head
