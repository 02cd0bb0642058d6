"""Figures: grids of images and maps with titles, scale bars and legends, without the global state of matplotlib."""

import io
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from dave_vit._internal.atomic_files import image_bytes, write_bytes
from dave_vit._internal.schema import check_choice
from dave_vit.viz.colors import COLORMAPS, HUES, Array, colorize
from dave_vit.viz.rendering import ImageLike, MapLike, as_image, as_map, blend, colorize_map, scale_map

FORMATS = ("png", "svg", "pdf")
MAX_CERTAINTY = 5.0
"""Standard errors at the end of the scale of certainty."""
_FONT = {"font.family": "DejaVu Sans", "svg.hashsalt": "dave", "pdf.fonttype": 42}
# in inches
_WIDTH, _GAP, _EDGE, _LINE = 2.7, 0.16, 0.12, 0.17
_SIZE = 9  # points
_LETTERS = 40  # letters of that size that fit into the width of a cell


@dataclass(frozen=True)
class ScaleBar:
    """Which colour stands for which number.

    Attributes:
        colormap: its name.
        limit: the number at the right end.
        caption: how that number was computed.
        signed: whether the left end is minus that number, or zero.
        unit: of the numbers.
    """

    colormap: str
    limit: float
    caption: str
    signed: bool = False
    unit: str = ""


@dataclass(frozen=True)
class Cell:
    """One picture of a grid.

    Attributes:
        colours: [H, W, 3] in [0, 1].
        title: above it; a long one is wrapped, then cut.
        bar: below it.
        legend: colours and their meaning, below it.
        outline: a mask [H, W] and the colour of the line around it.
        span: how many columns it covers.
    """

    colours: Array
    title: str = ""
    bar: ScaleBar | None = None
    legend: tuple[tuple[str, str], ...] = ()
    outline: tuple[Array, str] | None = None
    span: int = 1

    def width(self, column: float) -> float:
        """Return its width, where a column has this one."""
        return self.span * (column + _GAP) - _GAP


def image_cell(image: ImageLike, title: str = "image") -> Cell:
    """Return the image as it is."""
    return Cell(as_image(image), title)


def map_cell(
    values: MapLike, title: str = "map", *, signed: bool = False, like: Sequence[MapLike] | None = None, unit: str = ""
) -> Cell:
    """Return a map in colours, with its scale bar.

    Args:
        values: the map [H, W].
        title: above it.
        signed: evidence for the target in violet and against it in orange; otherwise from dark violet to yellow, and
            evidence against the target is darkest.
        like: other maps that share its scale; see `scale_map`.
        unit: of its values.
    """
    scaled, colormap = scale_map(values, signed=signed, like=like), "dave_signed" if signed else "dave"
    bar = ScaleBar(colormap, scaled.limit, scaled.caption, signed, unit)
    return Cell(colorize_map(scaled, colormap), title, bar)


def certainty_cell(values: MapLike, title: str = "certainty") -> Cell:
    """Return the standard errors between each pixel and zero; the scale is the same in all figures."""
    colours = colorize((as_map(values) / MAX_CERTAINTY).clamp(0, 1).numpy(), "dave_uncertainty")
    return Cell(colours, title, ScaleBar("dave_uncertainty", MAX_CERTAINTY, "", unit="standard errors or more"))


def targets_cell(image: ImageLike, maps: Sequence[MapLike], names: Sequence[str], *, shared: bool = True) -> Cell:
    """Return the maps of several targets over one image, a hue for each; on one scale, or each on its own."""
    legend = tuple((HUES[index % len(HUES)], name) for index, name in enumerate(names))
    return Cell(blend(image, maps, shared=shared), "all targets", legend=legend)


class Drawing(Figure):
    """A matplotlib figure that notebooks display; its file is written completely or not at all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(facecolor="white", **options)
        FigureCanvasAgg(self)

    def to_bytes(self, kind: str = "png", *, dpi: int = 150) -> bytes:
        """Encode the figure as "png", "svg" or "pdf"."""
        check_choice("figure format", kind, FORMATS)
        for text in self._texts():
            text.set_parse_math(False)  # names of files, classes and methods may contain dollar signs
        buffer = io.BytesIO()
        undated: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        with rc_context(_FONT):
            self.savefig(buffer, format=kind, dpi=dpi, metadata=undated.get(kind))
        return buffer.getvalue()

    def save(self, path: str | Path, *, dpi: int = 150) -> None:
        """Write a file in the format of its suffix: .png, .svg or .pdf."""
        target = Path(path)
        write_bytes(target, self.to_bytes(target.suffix.lower().removeprefix("."), dpi=dpi))

    def open(self) -> bool:
        """Open it in the system's image viewer, if there is a screen and no notebook that displays it anyway."""
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            return False
        if sys.platform.startswith("linux") and not ({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
            return False
        Image.open(io.BytesIO(self.to_bytes())).show()
        return True

    def _texts(self) -> Iterator[Text]:
        """Yield all texts except the numbers on axes, some of which are formulas."""
        yield from self.texts
        for axes in self.axes:
            yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
            legend = axes.get_legend()
            yield from legend.get_texts() if legend else ()

    def _repr_png_(self, *, dpi: int = 110) -> bytes:
        """Return a PNG for notebooks, which keep every picture: with 256 colours it takes a third of the space."""
        picture = Image.open(io.BytesIO(self.to_bytes("png", dpi=dpi)))
        return image_bytes(picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE))


def draw_grid(
    rows: Sequence[Sequence[Cell]],
    *,
    title: str = "",
    labels: Sequence[str] = (),
    width: float = _WIDTH,
    notes: Sequence[str] = (),
) -> Drawing:
    """Draw a grid of cells.

    Args:
        rows: of cells; their lengths may differ.
        title: above all rows.
        labels: one per row, at its left side.
        width: of a cell, in inches.
        notes: sentences below all rows.
    """
    left = _EDGE + (2 * _LINE if labels else 0)
    columns = max(sum(cell.span for cell in row) for row in rows)
    total = left + columns * width + (columns - 1) * _GAP + _EDGE
    heading = textwrap.wrap(title, int(total * _LETTERS / _WIDTH * 0.8))
    footing = [line for note in notes for line in textwrap.wrap(note, int(total * _LETTERS / _WIDTH * 1.05))]
    heights = [_row_height(row, width) for row in rows]
    below = len(footing) * _LINE + (0.08 if footing else 0)
    height = sum(heights) + _GAP * (len(rows) - 1) + 2 * _EDGE + len(heading) * 1.4 * _LINE + below
    with rc_context(_FONT):
        figure = Drawing(figsize=(total, height))
        if heading:
            figure.text(0.5, 1 - _EDGE / height, "\n".join(heading), ha="center", va="top", fontsize=_SIZE + 2)
        for number, line in enumerate(reversed(footing)):
            at = (_EDGE + number * _LINE) / height
            figure.text(_EDGE / total, at, line, va="bottom", fontsize=_SIZE - 1, color="#444444")
        top = height - _EDGE - len(heading) * 1.4 * _LINE
        for number, (row, tall) in enumerate(zip(rows, heights, strict=True)):
            if labels:
                label = textwrap.shorten(labels[number], int(tall * _LETTERS / _WIDTH), placeholder="…")
                middle = (top - tall / 2) / height
                figure.text(_EDGE / total, middle, label, rotation=90, va="center", fontsize=_SIZE)
            for column, cell in enumerate(row):
                place = left + column * (width + _GAP)
                _draw_cell(figure, cell, place, top - _title_height(row, width), cell.width(width))
            top -= tall + _GAP
    return figure


def _wrap_title(title: str, width: float) -> list[str]:
    return textwrap.wrap(title, int(width * _LETTERS / _WIDTH), max_lines=2, placeholder="…")


def _title_height(row: Sequence[Cell], width: float) -> float:
    return max(len(_wrap_title(cell.title, cell.width(width))) for cell in row) * _LINE + 0.05


def _height_below(cell: Cell) -> float:
    """Return the height of bar and legend under a picture, in inches."""
    return (0.36 if cell.bar else 0.0) + len(cell.legend) * _LINE + (0.1 if cell.legend else 0)


def _row_height(row: Sequence[Cell], width: float) -> float:
    return _title_height(row, width) + max(cell.width(width) * _aspect(cell) + _height_below(cell) for cell in row)


def _aspect(cell: Cell) -> float:
    height, width = cell.colours.shape[:2]
    return float(height / width)


def _draw_cell(figure: Drawing, cell: Cell, left: float, top: float, width: float) -> None:
    """Draw a cell; left and top are the upper left corner of its picture, in inches from the left and from below."""
    across, up = figure.get_size_inches()
    tall = width * _aspect(cell)
    axes = figure.add_axes((left / across, (top - tall) / up, width / across, tall / up))
    axes.imshow(cell.colours, interpolation="nearest")
    axes.set_axis_off()
    middle = (left + width / 2) / across
    for number, line in enumerate(reversed(_wrap_title(cell.title, width))):
        figure.text(middle, (top + 0.07 + number * _LINE) / up, line, ha="center", fontsize=_SIZE)
    if cell.outline is not None:
        mask, colour = cell.outline
        axes.contour(mask, levels=[0.5], colors=[colour], linewidths=1.4)
    if cell.bar is not None:
        _draw_scale_bar(figure, cell.bar, left, top - tall - 0.07, width)
    for number, (colour, text) in enumerate(cell.legend):
        _draw_legend_line(figure, colour, text, left, top - tall - 0.1 - (number + 0.5) * _LINE, width)


def _draw_legend_line(figure: Drawing, colour: str, text: str, left: float, middle: float, width: float) -> None:
    across, up = figure.get_size_inches()
    box = (left / across, (middle - 0.05) / up, 0.16 / across, 0.1 / up)
    figure.add_axes(box, facecolor=colour, xticks=[], yticks=[])
    shown = textwrap.shorten(text, int((width - 0.25) * _LETTERS / _WIDTH), placeholder="…")
    figure.text((left + 0.22) / across, middle / up, shown, va="center", fontsize=_SIZE - 1)


def _draw_scale_bar(figure: Drawing, bar: ScaleBar, left: float, top: float, width: float) -> None:
    """Draw a strip of colours, and under it the values of its ends."""
    across, up = figure.get_size_inches()
    strip = figure.add_axes((left / across, (top - 0.09) / up, width / across, 0.09 / up))
    strip.imshow(np.linspace(0, 1, 256)[None], aspect="auto", cmap=COLORMAPS[bar.colormap])
    strip.set_axis_off()
    number = f"{bar.limit:.2g}{bar.unit and f' {bar.unit}'}{bar.caption and f' = {bar.caption}'}"
    ends = ("against", f"for, {number}") if bar.signed else ("0", number)
    for x, align, text in zip((left, left + width), ("left", "right"), ends, strict=True):
        figure.text(x / across, (top - 0.23) / up, text, ha=align, fontsize=_SIZE - 2, color="#444444")
