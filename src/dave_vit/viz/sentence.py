"""A sentence whose words are shaded by numbers, as a cell of a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from dave_vit.viz.colors import COLORMAPS
from dave_vit.viz.contact_sheet import load_font
from dave_vit.viz.figures import Cell

_COLUMN, _LETTERS, _LINE, _GAP = 480, 30, 46, 10  # pixels: width of a column, size of letters, height of lines, gaps


@dataclass(frozen=True)
class ShadedWord:
    """A word of a sentence.

    Attributes:
        text: the word.
        share: its shade, from -1 (orange) over 0 (white) to 1 (violet); None for no shade.
        is_marked: whether a line strikes under it.
    """

    text: str
    share: float | None = None
    is_marked: bool = False


def sentence_cell(words: Sequence[ShadedWord], *, columns: int) -> Cell:
    """Draw a sentence over the width of some columns, wrapped where it is longer."""
    font, width = load_font(_LETTERS), columns * _COLUMN
    places, left, top = [], 0, 0
    for word in words:
        extent = round(font.getlength(word.text)) + _GAP
        if left and left + extent > width:
            left, top = 0, top + _LINE
        places.append((left, top, left + extent))
        left += extent + _GAP
    page = Image.new("RGB", (width, top + _LINE), "white")
    pen = ImageDraw.Draw(page)
    for word, (start, above, stop) in zip(words, places, strict=True):
        box = (start, above + 1, min(stop, width - 1), above + _LINE - 7)
        shade = "white" if word.share is None else _shade(word.share)
        is_dark = abs(word.share or 0.0) > 0.6
        pen.rectangle(box, fill=shade)
        pen.text((start + _GAP // 2, above + 1), word.text, fill="white" if is_dark else "#222222", font=font)
        if word.is_marked:
            pen.line((start, above + _LINE - 4, box[2], above + _LINE - 4), fill="#c4452f", width=3)
    return Cell(np.asarray(page, dtype=np.float64) / 255, span=columns)


def _shade(share: float) -> tuple[int, int, int]:
    red, green, blue, _ = COLORMAPS["dave_signed"](0.5 + min(max(share, -1.0), 1.0) / 2)
    return round(255 * red), round(255 * green), round(255 * blue)
