"""Animations: the map as it refines while samples arrive."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from dave_vit.errors import OptionError
from dave_vit.viz.cells import certainty_cell
from dave_vit.viz.contact_sheet import load_font
from dave_vit.viz.rendering import ImageLike, MapLike, colorize_map, enlarge, overlay, scale_map, smooth_for_overlay

FORMATS = ("gif", "webp")
_TEXT = 26  # pixels under the pictures, for text
_GAP = 8


@dataclass(frozen=True)
class AnimationStep:
    """The state after some samples: map [H, W] and, where it is known, certainty [H, W]."""

    samples: int
    map: MapLike
    certainty: MapLike | None = None


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
    if kind not in FORMATS:
        raise OptionError(f"animation format {kind!r}; expected one of {', '.join(FORMATS)}")
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
    buffer = io.BytesIO()
    options = {} if kind == "gif" else {"quality": 90}
    later = list(frames[1:])
    frames[0].save(buffer, kind, save_all=True, append_images=later, duration=list(durations), loop=0, **options)
    return buffer.getvalue()


def _draw_frame(image: ImageLike, step: AnimationStep, last: AnimationStep, side: int) -> Image.Image:
    over = overlay(image, scale_map(smooth_for_overlay(step.map), like=[smooth_for_overlay(last.map)]))
    pictures = {f"map over image, {step.samples} of {last.samples} samples": over}
    pictures["map"] = colorize_map(scale_map(step.map, like=[last.map]))
    if step.certainty is not None:
        pictures["certainty"] = certainty_cell(step.certainty).colours
    width, height = enlarge(over, side).size
    frame = Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height + _TEXT), "white")
    pen = ImageDraw.Draw(frame)
    for number, (text, colours) in enumerate(pictures.items()):
        frame.paste(enlarge(colours, side), (number * (width + _GAP), 0))
        pen.text((number * (width + _GAP) + 2, height + 5), text, fill="#222222", font=load_font())
    return frame
