"""Backgrounds: gradients, value noise, stripes, Voronoi cells, shapes, photographed textures; integers throughout.

Structural parameters (angles, periods, counts, lattices) are even here. The training recipe draws odd ones, and its
textures come from the other half of each photograph, so no background of a test occurs in training.
"""

import numpy as np

from dave_vit.data.builtin.draws import ONE, TURN, Draws, cos, sin
from dave_vit.data.builtin.sprites import Bytes, Ints, decode

TEXTURES = ("brick", "gravel", "grass")


def _colour(draws: Draws) -> Ints:
    return draws.bytes(3).astype(np.int32)


def _blend(weight: Ints, first: Ints, second: Ints) -> Bytes:
    """Blend from ``first`` to ``second`` by ``weight`` [n, n], 0 to 255; by table, since it has few values."""
    steps = np.arange(256, dtype=np.int32)[:, None]
    table = (first * (255 - steps) + second * steps + 127) // 255
    return np.asarray(table.astype(np.uint8)[weight])


def _along(size: int, angle: int) -> Ints:
    """Return the distance [n, n] of each pixel from the centre along a direction, in 1/16 pixel."""
    ruler = 2 * np.arange(size, dtype=np.int32) + 1 - size
    return np.asarray((ruler * cos(angle) + ruler[:, None] * sin(angle)) * 8 // ONE)


def gradient(size: int, draws: Draws) -> Bytes:
    """Paint a linear gradient between two colours."""
    reach = 12 * size  # beyond the corners: sqrt(2) / 2 of 16 * size
    weight = (_along(size, draws.even(0, TURN - 2)) + reach) * 255 // (2 * reach)
    return _blend(weight, _colour(draws), _colour(draws))


def radial(size: int, draws: Draws) -> Bytes:
    """Paint a radial gradient, with the square of the distance."""
    x = np.arange(size, dtype=np.int32) - draws.even(0, size - 2)
    y = np.arange(size, dtype=np.int32) - draws.even(0, size - 2)
    weight = np.minimum((x * x + (y * y)[:, None]) * 255 // (size * size), 255)
    return _blend(weight, _colour(draws), _colour(draws))


def _smooth(size: int, cells: int, lattice: Ints) -> Ints:
    """Interpolate lattice values [cells + 1, cells + 1, C] to [n, n, C] with the smoothstep 3t^2 - 2t^3."""
    place = np.arange(size, dtype=np.int32) * cells * 256 // size
    cell, t = place >> 8, place & 255
    t = (t * t * (768 - 2 * t)) >> 16  # 0..255
    left, right = lattice[:, cell], lattice[:, cell + 1]
    rows = (left * (256 - t)[:, None] + right * t[:, None]) >> 4  # [cells + 1, n, C], times 16
    top, bottom = rows[cell], rows[cell + 1]
    t = t[:, None, None]
    return np.asarray((top * (256 - t) + bottom * t) >> 12)


def _octaves(size: int, draws: Draws, channels: int) -> Bytes:
    """Return value noise of four octaves, stretched to 0..255, [n, n, C]."""
    cells = draws.even(2, 8)
    total = np.zeros((size, size, channels), dtype=np.int32)
    for octave in range(4):
        count = cells << octave
        lattice = draws.bytes((count + 1) * (count + 1) * channels).astype(np.int32)
        total += _smooth(size, count, lattice.reshape(count + 1, count + 1, channels)) << (3 - octave)
    stretched = (total - 15 * 128) // 9 + 128  # octaves average out: widen what is left of the range
    return np.clip(stretched, 0, 255).astype(np.uint8)


def clouds(size: int, draws: Draws) -> Bytes:
    """Paint value noise between two colours."""
    return _blend(_octaves(size, draws, 1)[..., 0].astype(np.int32), _colour(draws), _colour(draws))


def confetti(size: int, draws: Draws) -> Bytes:
    """Paint value noise in each colour channel."""
    return _octaves(size, draws, 3)


def stripes(size: int, draws: Draws) -> Bytes:
    """Paint stripes of two colours, hard or soft."""
    period = 16 * draws.even(size // 28 * 2, size // 4 // 2 * 2)
    phase = (_along(size, draws.even(0, TURN - 2)) + 64 * size) % period * 510 // period
    wave = np.where(phase < 256, phase, 510 - phase)
    hard = draws.integer(0, 1) == 1
    return _blend(np.where(wave < 128, 0, 255) if hard else wave, _colour(draws), _colour(draws))


def voronoi(size: int, draws: Draws) -> Bytes:
    """Paint Voronoi cells of random points, each of one colour, darker away from its point."""
    count = draws.even(6, 16)
    points = np.array([draws.integer(0, size - 1) for _ in range(2 * count)], dtype=np.int32).reshape(count, 2)
    ruler = np.arange(size, dtype=np.int32)
    x, y = ruler - points[:, :1], ruler - points[:, 1:]  # [count, n] each
    squares = (x * x)[:, None, :] + (y * y)[:, :, None]  # [count, n, n]
    nearest = squares.argmin(axis=0)
    shade = 255 - np.minimum(squares.min(axis=0) * 1200 // (size * size), 110)
    colours = draws.bytes(3 * count).reshape(count, 3).astype(np.int32)
    return np.asarray((colours[nearest] * shade[..., None] // 255).astype(np.uint8))


def shapes(size: int, draws: Draws) -> Bytes:
    """Paint rotated rectangles and ellipses over a gradient."""
    canvas = gradient(size, draws)
    for _ in range(draws.even(4, 12)):
        _shape(canvas, draws)
    return canvas


def _shape(canvas: Bytes, draws: Draws) -> None:
    size = len(canvas)
    cx, cy = draws.integer(0, size - 1), draws.integer(0, size - 1)
    a, b = draws.integer(size // 28, size // 7), draws.integer(size // 28, size // 7)
    angle, ellipse = draws.even(0, TURN - 2), draws.integer(0, 1) == 1
    reach = a + b
    rows = np.arange(max(0, cy - reach), min(size, cy + reach + 1), dtype=np.int64)
    columns = np.arange(max(0, cx - reach), min(size, cx + reach + 1), dtype=np.int64)
    x, y = columns - cx, (rows - cy)[:, None]
    u, v = x * cos(angle) + y * sin(angle), y * cos(angle) - x * sin(angle)  # pixels times ONE
    if ellipse:
        inside = (u * b >> 7) ** 2 + (v * a >> 7) ** 2 <= (a * b * (ONE >> 7)) ** 2
    else:
        inside = (np.abs(u) <= a * ONE) & (np.abs(v) <= b * ONE)
    canvas[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1][inside] = draws.bytes(3)


def texture(size: int, draws: Draws) -> Bytes:
    """Paint a crop of a photographed surface in two colours; mirrored where the image is larger."""
    photograph = decode(f"{draws.choice(TEXTURES)}.webp", "L")
    rows, columns = (_mirror_indices(size, length, draws) for length in photograph.shape)
    return _blend(photograph[rows[:, None], columns].astype(np.int32), _colour(draws), _colour(draws))


def _mirror_indices(size: int, length: int, draws: Draws) -> Ints:
    place = (np.arange(size, dtype=np.int32) + draws.integer(0, max(0, length - size))) % (2 * length)
    place = np.minimum(place, 2 * length - 1 - place)
    return place[::-1] if draws.integer(0, 1) else place


PAINTERS = (gradient, radial, clouds, confetti, stripes, voronoi, shapes, texture)


def paint(size: int, draws: Draws) -> Bytes:
    """Paint a background of a random kind, [n, n, 3]."""
    return draws.choice(PAINTERS)(size, draws)
