"""Contact sheets: many photographs with their maps on one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from dave_vit.errors import OptionError

_SIDE, _GAP, _LINE = 180, 6, 17  # pixels: side of a picture, gap inside a pair, line of text
_MARGIN, _HEAD = 16, 34  # pixels: around the sheet and between pairs; above all pairs


def load_font(size: int = 12) -> ImageFont.FreeTypeFont:
    """Load the font of text on pictures, of a size in pixels: DejaVu Sans, which comes with matplotlib."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), size)


def draw_contact_sheet(
    pairs: Sequence[tuple[Image.Image, Image.Image]], captions: Sequence[tuple[str, str]], title: str
) -> Image.Image:
    """Draw photographs beside their maps, each pair above two lines of text.

    Args:
        pairs: photograph and map; large ones are scaled down.
        captions: two lines per pair; long ones are cut.
        title: above all pairs.
    """
    if not pairs or len(pairs) != len(captions):
        raise OptionError(f"{len(pairs)} pairs and {len(captions)} captions; expected one per pair")
    small = [[_shrink(picture) for picture in pair] for pair in pairs]
    tall = max(picture.height for pair in small for picture in pair)
    width, height = 2 * _SIDE + _GAP, tall + 2 * _LINE + _GAP
    columns = max(min(2, len(pairs)), math.ceil(math.sqrt(len(pairs) * height / width)))  # about a square
    rows = -(-len(pairs) // columns)
    size = (columns * (width + _MARGIN) + _MARGIN, rows * (height + _MARGIN) + _HEAD + _MARGIN)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, _MARGIN - 2), _truncate(title, size[0] - 2 * _MARGIN), fill="#74449c", font=load_font())
    for number, (pair, lines) in enumerate(zip(small, captions, strict=True)):
        left = _MARGIN + number % columns * (width + _MARGIN)
        bottom = _HEAD + _MARGIN // 2 + number // columns * (height + _MARGIN) + tall
        for place, picture in enumerate(pair):  # aligned at the bottom, above their text
            sheet.paste(picture, (left + place * (_SIDE + _GAP), bottom - picture.height))
        for place, (line, colour) in enumerate(zip(lines, ("#222222", "#675f78"), strict=True)):
            pen.text((left, bottom + _GAP + place * _LINE), _truncate(line, width), fill=colour, font=load_font())
    return sheet


def _truncate(text: str, width: int) -> str:
    """Return as much of a text as fits on one line of this width in pixels."""
    text = " ".join(text.split())
    while len(text) > 1 and load_font().getlength(text) > width:
        text = text[:-2] + "…"
    return text


def _shrink(picture: Image.Image) -> Image.Image:
    small = picture.copy()
    small.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    return small
