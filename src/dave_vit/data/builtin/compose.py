"""Compose one image: objects over a background, with the exact pixels of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dave_vit.data.base import Mask
from dave_vit.data.builtin.backgrounds import gradient, paint
from dave_vit.data.builtin.draws import TURN, Draws
from dave_vit.data.builtin.sprites import load_sprite, render, tint

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Window = tuple[slice, slice]

# One size range for all objects (longest side over picture side, in 1/224), so that size does not reveal the label.
SMALLEST, LARGEST = 60, 116
TARGET_VISIBLE, DISTRACTOR_VISIBLE = 60, 50  # least visible part in percent, against the whole silhouette
_TILT = TURN * 25 // 360
_TRIES = 24


@dataclass(frozen=True)
class Art:
    """The sprite of an object; the label is -1 for a distractor."""

    label: int
    name: str
    style: str
    cell: int


@dataclass(frozen=True)
class Piece:
    """A rendered object: premultiplied colours [h, w, 4] and its silhouette [h, w]."""

    art: Art
    rgba: Bytes
    silhouette: Mask
    area: int


def make_piece(art: Art, size: int, draws: Draws, *, easy: bool) -> Piece:
    """Render an object at a random size, tilt and tint; upright and in its own colours where ``easy``."""
    length = draws.integer(SMALLEST * size // 224, LARGEST * size // 224)
    turn = 0 if easy else draws.integer(-_TILT, _TILT)
    rgba = render(load_sprite(art.style, art.cell), length, turn, flip=draws.integer(0, 1) == 1)
    if not easy:
        hue, saturation, brightness = draws.integer(-50, 50), draws.integer(180, 320), draws.integer(216, 280)
        rgba = tint(rgba, hue, saturation, brightness)
    silhouette = rgba[..., 3] >= 128
    return Piece(art, rgba, silhouette, int(silhouette.sum()))


def _windows(size: int, top: int, left: int, height: int, width: int) -> tuple[Window, Window]:
    """Return the part of the image that a piece covers, and the part of the piece inside of the image."""
    y0, y1, x0, x1 = max(top, 0), min(top + height, size), max(left, 0), min(left + width, size)
    there = (slice(y0, max(y0, y1)), slice(x0, max(x0, x1)))
    return there, (slice(y0 - top, max(y0, y1) - top), slice(x0 - left, max(x0, x1) - left))


def lay_out(pieces: list[Piece], size: int, draws: Draws) -> tuple[list[tuple[int, int]], Ints]:
    """Return the corners (top, left) of the pieces, bottom to top, and the owner [n, n] of each pixel (-1: background).

    Positions are drawn until enough of every object is visible; after too many failures all start again.
    """
    while True:
        owner = np.full((size, size), -1, dtype=np.int32)
        visible: list[int] = []
        corners: list[tuple[int, int]] = []
        while len(corners) < len(pieces):
            corner = _place(pieces, visible, owner, draws)
            if corner is None:
                break
            corners.append(corner)
        else:
            return corners, owner


def _place(pieces: list[Piece], visible: list[int], owner: Ints, draws: Draws) -> tuple[int, int] | None:
    """Place the next piece on top and update ``visible`` and ``owner``; return None where it does not fit."""
    size, piece = len(owner), pieces[len(visible)]
    height, width = piece.silhouette.shape
    for _ in range(_TRIES):
        top = draws.integer(size // 10, size - size // 10) - height // 2
        left = draws.integer(size // 10, size - size // 10) - width // 2
        there, here = _windows(size, top, left, height, width)
        silhouette = piece.silhouette[here]
        below = owner[there][silhouette]
        left_over = [*(visible - np.bincount(below + 1, minlength=len(visible) + 1)[1:]), len(below)]
        if all(_enough(pieces[i], int(count)) for i, count in enumerate(left_over)):
            owner[there][silhouette] = len(visible)
            visible[:] = [int(count) for count in left_over]
            return top, left
    return None


def _enough(piece: Piece, visible: int) -> bool:
    least = TARGET_VISIBLE if piece.art.label >= 0 else DISTRACTOR_VISIBLE
    return visible * 100 >= least * piece.area


def _centre_at(piece: Piece, corner: tuple[int, int], other: Piece) -> tuple[int, int]:
    """Return the corner at which another piece has the centre of a piece at this corner."""
    (height, width), (tall, wide) = piece.silhouette.shape, other.silhouette.shape
    return corner[0] + (height - tall) // 2, corner[1] + (width - wide) // 2


def _over(canvas: Bytes, rgba: Bytes, there: Window, here: Window) -> None:
    """Composite premultiplied colours over the canvas."""
    front = rgba[here].astype(np.int32)
    rest = 255 - front[..., 3:]
    canvas[there] = np.minimum(front[..., :3] + (canvas[there] * rest + 127) // 255, 255)


def _box(values: Ints, radius: int) -> Ints:
    """Return the mean over 2 * radius + 1 rows, transposed; the output is shorter by 2 * radius."""
    width = 2 * radius + 1
    sums = np.cumsum(values, axis=0, dtype=np.int32)
    sums[width:] -= sums[:-width].copy()
    return np.asarray((sums[width - 1 :] // width).T)


def _shadow(canvas: Bytes, piece: Piece, corner: tuple[int, int], draws: Draws) -> None:
    """Draw a soft shadow of the piece, down and to one side."""
    size = len(canvas)
    radius = draws.integer(1, 3) * size // 224 + 1
    strength = draws.integer(50, 150)
    drop = (draws.integer(1, 6) * size // 224, draws.integer(-5, 5) * size // 224)
    alpha = np.pad(piece.rgba[..., 3].astype(np.int32), 4 * radius)
    for _ in range(4):  # twice along each axis: two boxes make a triangle, soft enough
        alpha = _box(alpha, radius)
    top, left = corner[0] + drop[0] - 2 * radius, corner[1] + drop[1] - 2 * radius
    there, here = _windows(size, top, left, *alpha.shape)
    rest = 255 - alpha[here] * strength // 255
    canvas[there] = canvas[there] * rest[..., None] // 255


def _grain(canvas: Bytes, draws: Draws) -> Bytes:
    """Add triangular noise of up to 24 levels in each direction."""
    level = draws.integer(0, 24)
    noise = draws.bytes(2 * canvas.size).reshape(2, *canvas.shape).astype(np.int16)
    spread = (noise[0] + noise[1] - 255) * np.int16(level) >> 8
    return np.asarray(np.clip(canvas + spread, 0, 255).astype(np.uint8))


def compose(
    pieces: list[Piece], size: int, draws: Draws, *, easy: bool, edits: Mapping[int, Piece | None] | None = None
) -> tuple[Bytes, Ints]:
    """Compose the image [n, n, 3] and return it with the owner [n, n] of each pixel.

    Args:
        pieces: from the bottom to the top.
        size: side of the image in pixels.
        draws: of the background, the places and the shadows.
        easy: a gradient as the background, and no shadows.
        edits: pieces by their number that are drawn at the place of others, or None to draw nothing there; all else
            stays as it is, the owners too.
    """
    canvas = gradient(size, draws) if easy else paint(size, draws)
    corners, owner = lay_out(pieces, size, draws)
    for number, (piece, corner) in enumerate(zip(pieces, corners, strict=True)):
        shown = (edits or {}).get(number, piece)
        paper, shown = (canvas.copy(), piece) if shown is None else (canvas, shown)  # what is not drawn takes its draws
        corner = _centre_at(piece, corner, shown)
        if not easy:
            _shadow(paper, shown, corner, draws)
        _over(paper, shown.rgba, *_windows(size, *corner, *shown.silhouette.shape))
    return (canvas if easy else _grain(canvas, draws)), owner
