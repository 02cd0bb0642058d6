"""Contact sheets: many photographs with their maps on one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw

from dave_vit.errors import OptionError
from dave_vit.viz.animation import font
from dave_vit.viz.strip import cut_text

_SIDE, _GAP, _LINE = 180, 6, 17  # pixels: of a picture, between two that belong together, of a line of words
_MARGIN = 16  # around the sheet, and between those that do not
_HEAD = 34


def contact_sheet(
    pairs: Sequence[tuple[Image.Image, Image.Image]], words: Sequence[tuple[str, str]], title: str
) -> Image.Image:
    """Photographs beside their maps, in rows, each pair over two lines of words.

    Args:
        pairs: photograph and map, in their order; large ones are made smaller.
        words: two lines a pair; long ones are cut.
        title: above all.
    """
    if not pairs or len(pairs) != len(words):
        raise OptionError(f"{len(pairs)} pairs and {len(words)} words; a contact sheet has one of each, at least")
    small = [[_shrunk(picture) for picture in pair] for pair in pairs]
    tall = max(picture.height for pair in small for picture in pair)
    width, height = 2 * _SIDE + _GAP, tall + 2 * _LINE + _GAP
    columns = max(min(2, len(pairs)), math.ceil(math.sqrt(len(pairs) * height / width)))  # about a square
    rows = -(-len(pairs) // columns)
    size = (columns * (width + _MARGIN) + _MARGIN, rows * (height + _MARGIN) + _HEAD + _MARGIN)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, _MARGIN - 2), cut_text(title, size[0] - 2 * _MARGIN), fill="#74449c", font=font())
    for number, (pair, lines) in enumerate(zip(small, words, strict=True)):
        left = _MARGIN + number % columns * (width + _MARGIN)
        bottom = _HEAD + _MARGIN // 2 + number // columns * (height + _MARGIN) + tall
        for place, picture in enumerate(pair):  # on one line, over their words
            sheet.paste(picture, (left + place * (_SIDE + _GAP), bottom - picture.height))
        for place, (line, colour) in enumerate(zip(lines, ("#222222", "#675f78"), strict=True)):
            pen.text((left, bottom + _GAP + place * _LINE), cut_text(line, width), fill=colour, font=font())
    return sheet


def _shrunk(picture: Image.Image) -> Image.Image:
    small = picture.copy()
    small.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    return small
