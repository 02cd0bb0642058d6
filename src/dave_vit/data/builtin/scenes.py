"""Compose images of the benchmark by index: objects over a background, with the exact pixels of each."""

from dataclasses import dataclass, replace

import numpy as np

from dave_vit.data.base import Mask
from dave_vit.data.builtin.backgrounds import gradient, paint
from dave_vit.data.builtin.draws import TURN, Draws
from dave_vit.data.builtin.sprites import STYLES, Bytes, Ints, catalogue, load_sprite, render, tight_box, tint
from dave_vit.errors import OptionError

Window = tuple[slice, slice]

# One size range for all objects (longest side over picture side, in 1/224), so that size does not reveal the label.
SMALLEST, LARGEST = 60, 116
TARGET_VISIBLE, DISTRACTOR_VISIBLE = 60, 50  # least visible part in percent, against the whole silhouette
_TILT = TURN * 25 // 360
_TRIES = 24


@dataclass(frozen=True)
class Art:
    """The sprite of an object.

    Attributes:
        label: index in CLASS_NAMES, or -1 for a distractor.
        name: class name.
        style: art style, such as "noto".
        cell: of the style's sheet.
    """

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


def make_piece(art: Art, size: int, draws: Draws, *, easy: bool) -> Piece:
    """Render an object at a random size, tilt and tint; upright and in its own colours where ``easy``."""
    length = draws.integer(SMALLEST * size // 224, LARGEST * size // 224)
    turn = 0 if easy else draws.integer(-_TILT, _TILT)
    rgba = render(load_sprite(art.style, art.cell), length, turn, flip=draws.integer(0, 1) == 1)
    if not easy:
        hue, saturation, brightness = draws.integer(-50, 50), draws.integer(180, 320), draws.integer(216, 280)
        rgba = tint(rgba, hue, saturation, brightness)
    return Piece(art, rgba, rgba[..., 3] >= 128)


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
    return visible * 100 >= least * int(piece.silhouette.sum())


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


def compose(pieces: list[Piece], size: int, draws: Draws, *, easy: bool) -> tuple[Bytes, Ints]:
    """Compose the image [n, n, 3] and return it with the owner [n, n] of each pixel.

    Args:
        pieces: from the bottom to the top.
        size: side of the image in pixels.
        draws: of the background, the places and the shadows.
        easy: a gradient as the background, and no shadows.
    """
    canvas = gradient(size, draws) if easy else paint(size, draws)
    corners, owner = lay_out(pieces, size, draws)
    for piece, corner in zip(pieces, corners, strict=True):
        if not easy:
            _shadow(canvas, piece, corner, draws)
        _over(canvas, piece.rgba, *_windows(size, *corner, *piece.silhouette.shape))
    return (canvas if easy else _grain(canvas, draws)), owner


CLASS_NAMES: tuple[str, ...] = tuple(catalogue()["targets"])


@dataclass(frozen=True)
class _Mix:
    """Number of targets, range of the number of distractors, and whether the image is easy."""

    targets: int
    distractors: tuple[int, int]
    easy: bool = False


_MIXES = {"single": _Mix(1, (2, 4)), "pair": _Mix(2, (1, 2)), "plain": _Mix(1, (0, 0), easy=True)}


@dataclass(frozen=True)
class SceneObject(Art):
    """An object of an image, with its sprite.

    Attributes:
        mask: its visible pixels, [H, W].
        box: left, top, right, bottom of the mask, right and bottom excluded.
    """

    mask: Mask
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class Scene:
    """An image [H, W, 3] and its objects, targets first."""

    image: Bytes
    objects: tuple[SceneObject, ...]

    @property
    def targets(self) -> tuple[SceneObject, ...]:
        """The objects that belong to one of the benchmark's classes."""
        return tuple(thing for thing in self.objects if thing.label >= 0)


def compose_scene(index: int, split: str = "single", *, size: int = 224, seed: int = 0, family: str = "seen") -> Scene:
    """Compose an image with exact masks, the same on every machine; every hundred in a row show each class once.

    Args:
        index: of the image, 0 or above.
        split: "single" (a target and 2 to 4 distractors), "pair" (targets of two classes and 1 or 2 distractors) or
            "plain" (a target alone, upright, over a gradient).
        size: side of the image in pixels, from 64 to 512.
        seed: another seed gives other images.
        family: "seen" for art that the embedded models were trained on, "unseen" for another design.
    """
    check_scene_options(split, size, family)
    draws, cast, order, pieces = _draw_pieces(index, split, size, seed, family)
    image, owner = compose(pieces, size, draws, easy=_MIXES[split].easy)
    masks = (owner == order.index(i) for i in range(len(cast)))
    pairs = zip(cast, masks, strict=True)
    return Scene(image, tuple(SceneObject(**vars(art), mask=mask, box=tight_box(mask)) for art, mask in pairs))


def compose_edited_scene(index: int, target: int, replacement: str | None = None, *, seed: int = 0) -> Bytes:
    """Compose the image of `compose_scene` with one target removed, or another class at its place: [H, W, 3].

    Args:
        index: of the image.
        target: number of the target, 0 for the first.
        replacement: name of the class that is drawn instead; None to remove the target.
        seed: as of `compose_scene`.
    """
    size, family, own = 224, "seen", Draws(seed, index, target)
    draws, _, order, pieces = _draw_pieces(index, "pair", size, seed, family)
    number = order.index(target)
    if replacement is None:
        pieces[number] = replace(pieces[number], rgba=np.zeros_like(pieces[number].rgba))
    else:
        art = draw_art("targets", replacement, CLASS_NAMES.index(replacement), family, own)
        pieces[number] = _repaint(pieces[number], make_piece(art, size, own, easy=False))
    return compose(pieces, size, draws, easy=False)[0]


def _repaint(piece: Piece, other: Piece) -> Piece:
    """Return a piece with the outline of one, which decides where it lies, and the colours of another at its centre."""
    (height, width), (tall, wide) = piece.silhouette.shape, other.silhouette.shape
    margin = max(0, tall - height, wide - width)
    silhouette = np.pad(piece.silhouette, margin)
    rgba = np.zeros((*silhouette.shape, 4), dtype=np.uint8)
    top, left = margin + (height - tall) // 2, margin + (width - wide) // 2
    rgba[top : top + tall, left : left + wide] = other.rgba
    return replace(piece, rgba=rgba, silhouette=silhouette)


def _draw_pieces(
    index: int, split: str, size: int, seed: int, family: str
) -> tuple[Draws, list[Art], list[int], list[Piece]]:
    """Return the stream of draws, the objects with targets first, their order from the bottom, and their pieces."""
    mix = _MIXES[split]
    draws = Draws(seed, list(_MIXES).index(split), list(STYLES).index(family), index)
    cast = _draw_targets(index, seed, mix.targets, family, draws)
    cast += draw_distractors(draws.integer(*mix.distractors), family, draws)
    order = _shuffle_indices(len(cast), draws)
    return draws, cast, order, [make_piece(cast[i], size, draws, easy=mix.easy) for i in order]


def check_scene_options(split: str, size: int, family: str) -> None:
    """Raise OptionError for options that `compose_scene` does not take."""
    if split not in _MIXES:
        raise OptionError(f"split {split!r} is unknown; choose one of {', '.join(_MIXES)}")
    if family not in STYLES:
        raise OptionError(f"family {family!r} is unknown; choose one of {', '.join(STYLES)}")
    if not 64 <= size <= 512:
        raise OptionError(f"size {size} is out of range; choose 64 to 512")


def _draw_targets(index: int, seed: int, count: int, family: str, draws: Draws) -> list[Art]:
    """Choose targets: labels run through all classes, from another start in every hundred; the second is random."""
    block, place = divmod(index, len(CLASS_NAMES))
    start = Draws(seed, block).integer(0, len(CLASS_NAMES) - 1)
    first = (start + 37 * place) % len(CLASS_NAMES)  # 37 and 100 have no common divisor
    labels = [first, (first + draws.integer(1, len(CLASS_NAMES) - 1)) % len(CLASS_NAMES)][:count]
    return [draw_art("targets", CLASS_NAMES[label], label, family, draws) for label in labels]


def draw_distractors(count: int, family: str, draws: Draws) -> list[Art]:
    """Choose different distractor classes, of those that exist in all styles of the family."""
    every = catalogue()["distractors"].items()
    names = [name for name, art in every if all(style in art for style in STYLES[family])]
    chosen = [names.pop(draws.integer(0, len(names) - 1)) for _ in range(count)]
    return [draw_art("distractors", name, -1, family, draws) for name in chosen]


def draw_art(group: str, name: str, label: int, family: str, draws: Draws) -> Art:
    """Draw a sprite of a class of "targets" or "distractors"."""
    style = draws.choice(STYLES[family])
    return Art(label, name, style, draws.choice(catalogue()[group][name][style]))


def _shuffle_indices(count: int, draws: Draws) -> list[int]:
    """Return the indices below ``count`` in random order (Fisher and Yates)."""
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = draws.integer(0, i)
        order[i], order[j] = order[j], order[i]
    return order
