"""Compose images of the benchmark by index, with masks and boxes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dave_vit.data.base import Mask
from dave_vit.data.builtin.compose import Art, Piece, compose, make_piece
from dave_vit.data.builtin.draws import Draws
from dave_vit.data.builtin.sprites import STYLES, catalogue
from dave_vit.errors import OptionError

CLASS_NAMES: tuple[str, ...] = tuple(catalogue()["targets"])


@dataclass(frozen=True)
class _Mix:
    """Number of targets, range of the number of distractors, and whether the image is easy."""

    targets: int
    distractors: tuple[int, int]
    easy: bool = False


_MIXES = {"single": _Mix(1, (2, 4)), "pair": _Mix(2, (1, 2)), "plain": _Mix(1, (0, 0), easy=True)}


@dataclass(frozen=True)
class SceneObject:
    """An object of an image.

    Attributes:
        label: index in CLASS_NAMES, or -1 for a distractor.
        name: class name.
        style: art style, such as "noto".
        mask: its visible pixels, [H, W].
        box: left, top, right, bottom of the mask, right and bottom excluded.
    """

    label: int
    name: str
    style: str
    mask: Mask
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class Scene:
    """An image [H, W, 3] and its objects, targets first."""

    image: npt.NDArray[np.uint8]
    objects: tuple[SceneObject, ...]

    @property
    def targets(self) -> tuple[SceneObject, ...]:
        """The objects that belong to one of the benchmark's classes."""
        return tuple(thing for thing in self.objects if thing.label >= 0)


def _tight_box(mask: Mask) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


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
    objects = []
    for i, art in enumerate(cast):
        mask = owner == order.index(i)
        objects.append(SceneObject(art.label, art.name, art.style, mask, _tight_box(mask)))
    return Scene(image, tuple(objects))


def compose_edited_scene(
    index: int, target: int, replacement: str | None = None, split: str = "pair", *, size: int = 224, seed: int = 0
) -> npt.NDArray[np.uint8]:
    """Compose the image of `compose_scene` with one target removed, or another class at its place: [H, W, 3].

    Args:
        index: of the image.
        target: number of the target, 0 for the first.
        replacement: name of the class that is drawn instead; None to remove the target.
        split: as of `compose_scene`.
        size: as of `compose_scene`.
        seed: as of `compose_scene`.
    """
    family = "seen"
    draws, _, order, pieces = _draw_pieces(index, split, size, seed, family)
    piece, own = None, Draws(seed, index, target)
    if replacement is not None:
        art = draw_art("targets", replacement, CLASS_NAMES.index(replacement), family, own)
        piece = make_piece(art, size, own, easy=False)
    image, _ = compose(pieces, size, draws, easy=_MIXES[split].easy, edits={order.index(target): piece})
    return image


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
