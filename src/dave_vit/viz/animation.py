"""Animations: the map as it refines while samples arrive."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from dave_vit._internal.atomic_files import write_bytes
from dave_vit.errors import OptionError
from dave_vit.viz.cells import sureness_cell
from dave_vit.viz.colors import Array
from dave_vit.viz.montage import load_font
from dave_vit.viz.rendering import (
    ImageLike,
    MapLike,
    as_image,
    colorize_map,
    enlarge,
    overlay,
    scale_map,
    smooth_for_overlay,
)

KINDS = ("gif", "webp")
_STRIP = 26  # pixels under the pictures, for words
_GAP = 8


@dataclass(frozen=True)
class AnimationStep:
    """The state after some samples: map [H, W] and, where it is known, sureness [H, W]."""

    samples: int
    map: MapLike
    sureness: MapLike | None = None


def animate(
    image: ImageLike, steps: Sequence[AnimationStep], kind: str = "gif", *, seconds: float = 3.0, side: int = 224
) -> bytes:
    """Overlay, map and sureness after each step, as an animated GIF or WebP that rests on its last frame.

    All frames share the scale of the last one, so that a change of brightness is a change of the map.

    Args:
        image: as the model saw it.
        steps: in their order.
        kind: "gif" or "webp".
        seconds: for all steps but the last.
        side: least height of the pictures in pixels.
    """
    if kind not in KINDS:
        raise OptionError(f"animation format {kind!r}; expected one of {', '.join(KINDS)}")
    if not steps:
        raise OptionError("an animation of no steps; give at least one")
    frames = [_frame(as_image(image), step, steps[-1], side) for step in steps]
    pause = round(1000 * seconds / max(1, len(frames) - 1))
    return encode_animation(frames, [pause] * (len(frames) - 1) + [2000], kind)


def encode_animation(frames: Sequence[Image.Image], durations: Sequence[int], kind: str = "gif") -> bytes:
    """Pictures one after the other, each for so many milliseconds, as an animated GIF or WebP."""
    if kind == "gif":  # one palette for all, or colours flicker
        palette = frames[-1].quantize(255)
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    options = {} if kind == "gif" else {"quality": 90}
    later = list(frames[1:])
    frames[0].save(buffer, kind, save_all=True, append_images=later, duration=list(durations), loop=0, **options)
    return buffer.getvalue()


def save_animation(path: str | Path, image: ImageLike, steps: Sequence[AnimationStep], *, seconds: float = 3.0) -> None:
    """Writes a .gif or .webp file."""
    target = Path(path)
    write_bytes(target, animate(image, steps, target.suffix.lower().removeprefix("."), seconds=seconds))


def _frame(image: Array, step: AnimationStep, last: AnimationStep, side: int) -> Image.Image:
    over = overlay(image, scale_map(smooth_for_overlay(step.map), like=[smooth_for_overlay(last.map)]))
    pictures = [enlarge(over, side), enlarge(colorize_map(scale_map(step.map, like=[last.map])), side)]
    words = ["map over image", "map"]
    if step.sureness is not None:
        pictures.append(enlarge(sureness_cell(step.sureness).colours, side))
        words.append("sureness")
    width, height = pictures[0].size
    frame = Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height + _STRIP), "white")
    pen = ImageDraw.Draw(frame)
    words[0] += f", {step.samples} of {last.samples} samples"
    for number, (picture, text) in enumerate(zip(pictures, words, strict=True)):
        frame.paste(picture, (number * (width + _GAP), 0))
        pen.text((number * (width + _GAP) + 2, height + 5), text, fill="#222222", font=load_font())
    return frame
