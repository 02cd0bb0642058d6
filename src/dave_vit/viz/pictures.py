"""Pictures that Pillow draws: animations of a map as it refines, contact sheets, and sentences with shaded words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dave_vit._internal.atomic_files import image_bytes
from dave_vit._internal.schema import check_choice
from dave_vit.errors import OptionError
from dave_vit.viz import rendering
from dave_vit.viz.colors import COLORMAPS, HUES, Array
from dave_vit.viz.figures import Cell, certainty_cell, map_cell
from dave_vit.viz.rendering import ImageLike, MapLike, Panel, Photo, Scales, View, to_pillow

FORMATS = ("gif", "webp")
# pixels
_TEXT, _GAP = 26, 8  # animations: under the pictures, for text; between pictures
_SIDE, _SPACE, _LINE = 180, 6, 17  # contact sheets: side of a picture, gap inside a pair, line of text
_MARGIN, _HEAD = 16, 34  # around the sheet and between pairs; above all pairs
_COLUMN, _LETTERS, _WORD_LINE = 480, 30, 46  # sentences: width of a column, size of letters, height of lines
_WORD_GAP = 10
_OVERLAY_SIDE, _NAME_LETTERS, _NAME_LINE = 448, 16, 28  # overlays: least side of an input; names of targets below


AnimationStep = tuple[int, Panel]
"""A number of samples, and the map after them."""


def animate(
    image: ImageLike, steps: Sequence[AnimationStep], kind: str = "gif", *, seconds: float = 3.0, side: int = 224
) -> bytes:
    """Draw overlay, map and certainty after each step, as an animated GIF or WebP that rests on its last frame.

    All frames share the scale of the last one, so that a change of brightness is a change of the map.

    Args:
        image: as the model saw it.
        steps: in their order.
        kind: "gif" or "webp".
        seconds: for all steps but the last.
        side: least height of the pictures in pixels.
    """
    check_choice("animation format", kind, FORMATS)
    if not steps:
        raise OptionError("an animation of no steps; give at least one")
    frames = [_draw_frame(image, step, steps[-1], side) for step in steps]
    pause = round(1000 * seconds / max(1, len(frames) - 1))
    return encode_animation(frames, [pause] * (len(frames) - 1) + [2000], kind)


def encode_animation(frames: Sequence[Image.Image], durations: Sequence[int], kind: str = "gif") -> bytes:
    """Encode frames, each shown for so many milliseconds, as an animated GIF or WebP."""
    if kind == "gif":  # one palette for all, or colours flicker
        palette = frames[-1].quantize(255)
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    quality = {} if kind == "gif" else {"quality": 90}
    later = {"save_all": True, "append_images": list(frames[1:]), "duration": list(durations), "loop": 0}
    return image_bytes(frames[0], kind, **later, **quality)


def _draw_frame(image: ImageLike, step: AnimationStep, last: AnimationStep, side: int) -> Image.Image:
    (samples, shown), (total, final) = step, last
    smooth, last_smooth = (rendering.smooth_for_overlay(each.map) for each in (shown, final))
    over = rendering.overlay(image, rendering.scale_map(smooth, like=[last_smooth]))
    pictures = {f"map over image, {samples} of {total} samples": over}
    pictures["map"] = map_cell(shown.map, like=[final.map]).colours
    if shown.certainty is not None:
        pictures["certainty"] = certainty_cell(shown.certainty).colours
    width, height = _enlarge(over, side).size
    frame = Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height + _TEXT), "white")
    pen = ImageDraw.Draw(frame)
    for number, (text, colours) in enumerate(pictures.items()):
        frame.paste(_enlarge(colours, side), (number * (width + _GAP), 0))
        pen.text((number * (width + _GAP) + 2, height + 5), text, fill="#222222", font=load_font())
    return frame


def _enlarge(colours: Array, side: int) -> Image.Image:
    """Enlarge an image by an integer factor until its shorter side has at least so many pixels."""
    image = to_pillow(colours)
    factor = -(-side // min(image.size))
    size = (image.width * factor, image.height * factor)
    return image.resize(size, Image.Resampling.BICUBIC) if factor > 1 else image


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
    small = [[shrink(picture, _SIDE) for picture in pair] for pair in pairs]
    tall = max(picture.height for pair in small for picture in pair)
    width, height = 2 * _SIDE + _SPACE, tall + 2 * _LINE + _SPACE
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
            sheet.paste(picture, (left + place * (_SIDE + _SPACE), bottom - picture.height))
        for place, (line, colour) in enumerate(zip(lines, ("#222222", "#675f78"), strict=True)):
            pen.text((left, bottom + _SPACE + place * _LINE), _truncate(line, width), fill=colour, font=load_font())
    return sheet


def _truncate(text: str, width: int, letters: int = 12) -> str:
    """Return as much of a text as fits on one line of this width in pixels."""
    text = " ".join(text.split())
    while len(text) > 1 and load_font(letters).getlength(text) > width:
        text = text[:-2] + "…"
    return text


def shrink(picture: Image.Image, side: int) -> Image.Image:
    """Return a copy whose longer side has at most so many pixels."""
    small = picture.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return small


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


def _shade(share: float) -> tuple[int, ...]:
    return tuple(round(255 * part) for part in COLORMAPS["dave_signed"](0.5 + min(max(share, -1.0), 1.0) / 2)[:3])


def overlay_maps(images: Sequence[ImageLike], maps: Sequence[MapLike], view: View, scales: Scales) -> list[Image.Image]:
    """Draw each map [H, W] over its image, all on one colour scale or each on its own."""
    scaled = rendering.scale_overlays(maps, signed=view == "signed", shared=scales == "shared")
    return [to_pillow(rendering.overlay(image, values)) for image, values in zip(images, scaled, strict=True)]


def overlay_on_photo(photo: Photo, groups: Sequence[Sequence[Panel]], view: View, scales: Scales) -> Image.Image:
    """Lay maps over the whole photograph: several targets in several hues, or beside each other if they are signed.

    Args:
        photo: with the areas that the model sees.
        groups: for each target the panels of all parts.
        view: evidence for the target, or evidence for and against it.
        scales: one for all targets, or one for each.
    """
    signed = view == "signed"
    large = photo.resize(-(-_OVERLAY_SIDE // min(photo.parts[0].input_size)))
    own = [[rendering.smooth_for_overlay(panel.values(view), signed=signed) for panel in parts] for parts in groups]
    like = [[values for parts in own for values in parts]] * len(own) if scales == "shared" else own
    shown = [
        rendering.scale_map(large.place(parts), signed=signed, like=limits)
        for parts, limits in zip(own, like, strict=True)
    ]
    names = [parts[0].target for parts in groups] if len(groups) > 1 else []
    if names and not signed:
        return _write_names(to_pillow(large.frame_seen_area(rendering.blend(large.image, shown))), names, HUES)
    beside = np.concatenate([large.frame_seen_area(rendering.overlay(large.image, each)) for each in shown], 1)
    return _write_names(to_pillow(beside), names)


def _write_names(picture: Image.Image, names: Sequence[str], hues: Sequence[str] = ()) -> Image.Image:
    """Write names below a picture: one below the other, each beside its hue, or beside each other without hues."""
    lines, columns = (len(names), 1) if hues else (min(1, len(names)), max(1, len(names)))
    page = Image.new("RGB", (picture.width, picture.height + lines * _NAME_LINE), "white")
    page.paste(picture)
    pen, width = ImageDraw.Draw(page), picture.width // columns
    for number, name in enumerate(names):
        left, top = number % columns * width + _SPACE, picture.height + number // columns * _NAME_LINE
        if hues:
            pen.rectangle((left, top + 7, left + 14, top + 21), fill=hues[number % len(hues)])
        shown = _truncate(name, width - _NAME_LINE - _SPACE, _NAME_LETTERS)
        pen.text((left + (_NAME_LINE if hues else 0), top + 4), shown, fill="#222222", font=load_font(_NAME_LETTERS))
    return page
