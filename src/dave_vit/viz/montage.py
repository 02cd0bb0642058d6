"""Pictures with text below them on one sheet: strips of words or frames, and contact sheets of photographs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from dave_vit.errors import OptionError

_GAP = 8  # pixels between the pictures of a strip
_TEXT = 26  # pixels below each of them
_SIDE, _PAIR_GAP, _LINE = 180, 6, 17  # contact sheet, in pixels: a picture, the gap inside a pair, a line of text
_MARGIN, _HEAD = 16, 34  # around the sheet and between pairs; above all pairs


def load_font() -> ImageFont.FreeTypeFont:
    """Load the font of text below pictures: DejaVu Sans, which comes with matplotlib."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), 12)


def truncate_text(text: str, width: int) -> str:
    """Return as much of a text as fits on one line of this width in pixels."""
    text = " ".join(text.split())
    while len(text) > 1 and load_font().getlength(text) > width:
        text = text[:-2] + "…"
    return text


def draw_strip(
    pictures: Sequence[Image.Image], captions: Sequence[str], *, columns: int = 6, side: int = 224
) -> Image.Image:
    """Draw pictures of one size row by row, each above its caption.

    Args:
        pictures: from left to right.
        captions: one per picture; long ones are cut.
        columns: pictures per row.
        side: width of each picture in pixels.
    """
    if not pictures or len(pictures) != len(captions):
        raise OptionError(f"{len(pictures)} pictures and {len(captions)} captions; expected one per picture")
    height = round(side * pictures[0].height / pictures[0].width)
    across, down = min(columns, len(pictures)), -(-len(pictures) // columns)
    size = (across * (side + _GAP) - _GAP, down * (height + _TEXT + _GAP) - _GAP)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = number % columns * (side + _GAP), number // columns * (height + _TEXT + _GAP)
        sheet.paste(picture.resize((side, height), Image.Resampling.LANCZOS), (left, top))
        text, place = truncate_text(caption, side), (left + side / 2, top + height + 5)
        pen.text(place, text, fill="#222222", font=load_font(), anchor="ma")
    return sheet


def draw_contact_sheet(
    pairs: Sequence[tuple[Image.Image, Image.Image]], captions: Sequence[tuple[str, str]], title: str
) -> Image.Image:
    """Draw photographs beside their maps, each pair above two lines of text.

    Args:
        pairs: photograph and map; large ones are made smaller.
        captions: two lines per pair; long ones are cut.
        title: above all pairs.
    """
    if not pairs or len(pairs) != len(captions):
        raise OptionError(f"{len(pairs)} pairs and {len(captions)} captions; expected one per pair")
    small = [[_shrink(picture) for picture in pair] for pair in pairs]
    tall = max(picture.height for pair in small for picture in pair)
    width, height = 2 * _SIDE + _PAIR_GAP, tall + 2 * _LINE + _PAIR_GAP
    columns = max(min(2, len(pairs)), math.ceil(math.sqrt(len(pairs) * height / width)))  # about a square
    rows = -(-len(pairs) // columns)
    size = (columns * (width + _MARGIN) + _MARGIN, rows * (height + _MARGIN) + _HEAD + _MARGIN)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, _MARGIN - 2), truncate_text(title, size[0] - 2 * _MARGIN), fill="#74449c", font=load_font())
    for number, (pair, lines) in enumerate(zip(small, captions, strict=True)):
        left = _MARGIN + number % columns * (width + _MARGIN)
        bottom = _HEAD + _MARGIN // 2 + number // columns * (height + _MARGIN) + tall
        for place, picture in enumerate(pair):  # aligned at the bottom, above their text
            sheet.paste(picture, (left + place * (_SIDE + _PAIR_GAP), bottom - picture.height))
        for place, (line, colour) in enumerate(zip(lines, ("#222222", "#675f78"), strict=True)):
            at = (left, bottom + _PAIR_GAP + place * _LINE)
            pen.text(at, truncate_text(line, width), fill=colour, font=load_font())
    return sheet


def _shrink(picture: Image.Image) -> Image.Image:
    small = picture.copy()
    small.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    return small
