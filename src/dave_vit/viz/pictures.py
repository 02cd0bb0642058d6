"""Pictures that Pillow draws: animations of clips, and sentences with shaded words."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dave_vit.viz.colors import COLORMAPS
from dave_vit.viz.figures import Cell

# of sentences, in pixels
_COLUMN, _LETTERS, _WORD_LINE = 480, 30, 46  # width of a column, size of letters, height of lines
_WORD_GAP = 10


def encode_animation(frames: Sequence[Image.Image], milliseconds: int) -> bytes:
    """Encode frames, each shown for so many milliseconds, as an animated GIF."""
    palette = frames[-1].quantize(255)  # one for all, or colours flicker
    first, *later = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    first.save(buffer, "gif", save_all=True, append_images=later, duration=milliseconds, loop=0)
    return buffer.getvalue()


def load_font(size: int = 12) -> ImageFont.FreeTypeFont:
    """Load the font of text on pictures, of a size in pixels: DejaVu Sans, which comes with matplotlib."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), size)


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
        extent = round(font.getlength(word.text)) + _WORD_GAP
        if left and left + extent > width:
            left, top = 0, top + _WORD_LINE
        places.append((left, top, left + extent))
        left += extent + _WORD_GAP
    page = Image.new("RGB", (width, top + _WORD_LINE), "white")
    pen = ImageDraw.Draw(page)
    for word, (start, above, stop) in zip(words, places, strict=True):
        box = (start, above + 1, min(stop, width - 1), above + _WORD_LINE - 7)
        shade = "white" if word.share is None else _shade(word.share)
        is_dark = abs(word.share or 0.0) > 0.6
        pen.rectangle(box, fill=shade)
        pen.text((start + _WORD_GAP // 2, above + 1), word.text, fill="white" if is_dark else "#222222", font=font)
        if word.is_marked:
            pen.line((start, above + _WORD_LINE - 4, box[2], above + _WORD_LINE - 4), fill="#c4452f", width=3)
    return Cell(np.asarray(page, dtype=np.float64) / 255, span=columns)


def _shade(share: float) -> tuple[int, int, int]:
    red, green, blue, _ = COLORMAPS["dave_signed"](0.5 + min(max(share, -1.0), 1.0) / 2)
    return round(255 * red), round(255 * green), round(255 * blue)
