"""Strips: pictures in rows with words under them, such as the words of an answer or the frames of a clip."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

from dave_vit.errors import OptionError
from dave_vit.viz.animation import font

_LINE, _GAP = 26, 8  # pixels: for words under a picture, and between pictures


def strip(pictures: Sequence[Image.Image], words: Sequence[str], *, columns: int = 6, side: int = 224) -> Image.Image:
    """Pictures of one size from left to right and from above, each over its words.

    Args:
        pictures: in their order.
        words: one text a picture; long ones are cut.
        columns: pictures in a row.
        side: width of each in pixels.
    """
    if not pictures or len(pictures) != len(words):
        raise OptionError(f"{len(pictures)} pictures and {len(words)} words; a strip has one of each, at least")
    height = round(side * pictures[0].height / pictures[0].width)
    across = min(columns, len(pictures))
    down = -(-len(pictures) // columns)
    size = (across * (side + _GAP) - _GAP, down * (height + _LINE + _GAP) - _GAP)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for number, (picture, text) in enumerate(zip(pictures, words, strict=True)):
        left, top = number % columns * (side + _GAP), number // columns * (height + _LINE + _GAP)
        sheet.paste(picture.resize((side, height), Image.Resampling.LANCZOS), (left, top))
        pen.text((left + side / 2, top + height + 5), cut_text(text, side), fill="#222222", font=font(), anchor="ma")
    return sheet


def cut_text(text: str, width: int) -> str:
    """As much of a text as fits, on one line."""
    text = " ".join(text.split())
    while len(text) > 1 and font().getlength(text) > width:
        text = text[:-2] + "…"
    return text
