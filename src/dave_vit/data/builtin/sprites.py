"""Sprites: load them from sheets; rotate, scale and tint them in integer arithmetic.

Pillow only decodes (lossless WebP has one right answer). Its resampling is not used: it has several SIMD paths that may
round differently, while integers do not.
"""

import io
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
import numpy.typing as npt
from PIL import Image

from dave_vit.data.builtin.draws import ONE, cos, sin
from dave_vit.errors import DataError

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

STYLES = {"seen": ("noto", "fluent-emoji-flat", "twemoji"), "unseen": ("emojione",)}
CELL = 128  # side of a sprite in its sheet
_COLUMNS = 16


def read_asset(name: str) -> bytes:
    """Return the bytes of a file of the benchmark."""
    file = resources.files("dave_vit.data.builtin") / "assets" / name
    if not file.is_file():
        raise DataError(f"the benchmark's file {name} is not installed; install dave-vit again from its wheel")
    return file.read_bytes()


@cache
def decode(name: str, mode: str) -> Bytes:
    """Decode an image of the benchmark: [H, W] or [H, W, C], read-only."""
    with Image.open(io.BytesIO(read_asset(name))) as image:
        return np.asarray(image.convert(mode))


@cache
def catalogue() -> dict[str, dict[str, dict[str, list[int]]]]:
    """Return targets and distractors: class name -> style -> cells of the style's sheet."""
    return json.loads(read_asset("classes.json"))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Sprite:
    """A trimmed sprite at full and at half resolution, colours premultiplied.

    Attributes:
        levels: [h, w, 4] with a transparent border.
        length: longest side of the trimmed art in pixels of level 0.
    """

    levels: tuple[Ints, Ints]
    length: int


def tight_box(mask: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of what is true in a mask, right and bottom excluded."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


@cache
def load_sprite(style: str, cell: int) -> Sprite:
    """Load a sprite by its style and its cell in the sheet."""
    row, column = divmod(cell, _COLUMNS)
    rgba = decode(f"{style}.webp", "RGBA")[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
    left, top, right, bottom = tight_box(rgba[..., 3] >= 128)
    art = rgba[top:bottom, left:right].astype(np.int32)
    art[..., :3] = (art[..., :3] * art[..., 3:] + 127) // 255  # premultiplied
    height, width = art.shape[:2]
    evened = np.pad(art, ((0, height % 2), (0, width % 2), (0, 0)))
    half = (evened[::2, ::2] + evened[1::2, ::2] + evened[::2, 1::2] + evened[1::2, 1::2] + 2) // 4
    border = ((2, 2), (2, 2), (0, 0))
    return Sprite((np.pad(art, border), np.pad(half, border)), max(height, width))


def render(sprite: Sprite, size: int, turn: int, *, flip: bool) -> Bytes:
    """Render a sprite with longest side ``size``, turned by ``turn`` steps: [h, w, 4], premultiplied.

    Bilinear, from the level with the closest resolution.
    """
    step = (sprite.length << 16) // size  # source pixels per output pixel, 16.16
    level = 1 if step >= 3 << 15 else 0
    step >>= level
    art = sprite.levels[level]
    c, s = cos(turn) * step // ONE, sin(turn) * step // ONE
    height = (abs(c) * art.shape[0] + abs(s) * art.shape[1]) // (step * step >> 16) + 1
    width = (abs(c) * art.shape[1] + abs(s) * art.shape[0]) // (step * step >> 16) + 1
    x = 2 * np.arange(width, dtype=np.int64) + 1 - width  # twice the distance from the centre
    y = (2 * np.arange(height, dtype=np.int64) + 1 - height)[:, None]
    u = (c * x + s * y) // 2 + (art.shape[1] - 1) * (1 << 15)
    v = (c * y - s * x) // 2 + (art.shape[0] - 1) * (1 << 15)
    return _sample(np.ascontiguousarray(art[:, ::-1]) if flip else art, u, v)


def _sample(art: Ints, u: npt.NDArray[np.int64], v: npt.NDArray[np.int64]) -> Bytes:
    """Sample colours at fixed-point positions (column u, row v), bilinear; the border continues outside."""
    height, width = art.shape[:2]
    u = np.clip(u, 0, ((width - 1) << 16) - 1)
    v = np.clip(v, 0, ((height - 1) << 16) - 1)
    fu, fv = ((position >> 8 & 255).astype(np.int32)[..., None] for position in (u, v))
    place = (v >> 16) * width + (u >> 16)
    flat = art.reshape(-1, 4)
    top = (flat[place] * (256 - fu) + flat[place + 1] * fu) >> 8
    bottom = (flat[place + width] * (256 - fu) + flat[place + width + 1] * fu) >> 8
    return np.asarray(((top * (256 - fv) + bottom * fv) >> 8).astype(np.uint8))


def tint(rgba: Bytes, hue: int, saturation: int, brightness: int) -> Bytes:
    """Rotate the colours by ``hue`` steps about the grey axis; saturation and brightness in units of 1/256.

    The matrix keeps luminance (weights 54, 183, 19 of 256) before the brightness applies, and it is linear, so
    premultiplied colours need no division; they stay at or below their alpha.
    """
    luma = np.array([54, 183, 19], dtype=np.int64)
    c, s = cos(hue) * saturation, sin(hue) * saturation  # ONE * 256
    cross = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=np.int64)  # turn about grey, times sqrt(3)
    inverse_root3 = 9459  # ONE / sqrt(3)
    chroma = 256 * np.eye(3, dtype=np.int64) - luma  # colour minus its luminance, times 256
    twist = cross @ chroma
    twist -= (luma @ twist // 256)[None, :]  # the turned part must carry no luminance either
    matrix = luma[None, :] * (ONE * 256) + c * chroma + s * twist * inverse_root3 // ONE  # ONE * 256 * 256
    matrix = (matrix // (1 << 14) * brightness // (1 << 8)).astype(np.int32)  # of 65536 -> times brightness
    wide = rgba.astype(np.int32)
    wide[..., :3] = np.clip((wide[..., :3] @ matrix.T) >> 16, 0, wide[..., 3:])
    return wide.astype(np.uint8)
