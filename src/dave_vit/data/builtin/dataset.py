"""The benchmark: images by index, with masks and boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dave_vit.data.base import Mask
from dave_vit.data.builtin.compose import Art, compose, make_piece
from dave_vit.data.builtin.draws import Draws
from dave_vit.data.builtin.sprites import STYLES, catalogue
from dave_vit.errors import OptionError

CLASS_NAMES: tuple[str, ...] = tuple(catalogue()["targets"])
DISTRACTOR_NAMES: tuple[str, ...] = tuple(catalogue()["distractors"])


@dataclass(frozen=True)
class _Mix:
    """Number of targets, range of the number of distractors, and whether the image is easy."""

    targets: int
    distractors: tuple[int, int]
    easy: bool = False


_MIXES = {"single": _Mix(1, (2, 4)), "pair": _Mix(2, (1, 2)), "plain": _Mix(1, (0, 0), easy=True)}
_FAMILIES = list(STYLES)


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


class BuiltinDataset(Sequence[Scene]):
    """Images with exact masks; each is determined by seed, split, family and index, on every machine.

    Args:
        split: "single" (a target and 2 to 4 distractors), "pair" (targets of two classes and 1 or 2 distractors) or
            "plain" (a target alone, upright, over a gradient).
        size: side of the pictures in pixels, from 64 to 512.
        seed: another seed gives other images.
        family: "seen" for art that the embedded models were trained on, "unseen" for another design.
        length: number of images; every hundred in a row show each class once.
    """

    def __init__(
        self, split: str = "single", *, size: int = 224, seed: int = 0, family: str = "seen", length: int = 1000
    ) -> None:
        if split not in _MIXES:
            raise OptionError(f"split {split!r} is unknown; choose one of {', '.join(_MIXES)}")
        if family not in _FAMILIES:
            raise OptionError(f"family {family!r} is unknown; choose one of {', '.join(_FAMILIES)}")
        if not 64 <= size <= 512:
            raise OptionError(f"size {size} is out of range; choose 64 to 512")
        self.split, self.size, self.seed, self.family, self.length = split, size, seed, family, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Scene:  # type: ignore[override]
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} is out of range; the set has {self.length} pictures")
        mix = _MIXES[self.split]
        key = (list(_MIXES).index(self.split), _FAMILIES.index(self.family))
        draws = Draws(self.seed, *key, index)
        cast = self._targets(index, mix.targets, draws) + self._distractors(draws.integer(*mix.distractors), draws)
        order = _shuffle_indices(len(cast), draws)
        pieces = [make_piece(cast[i], self.size, draws, easy=mix.easy) for i in order]
        image, owner = compose(pieces, self.size, draws, easy=mix.easy)
        objects = []
        for i, art in enumerate(cast):
            mask = owner == order.index(i)
            objects.append(SceneObject(art.label, art.name, art.style, mask, _tight_box(mask)))
        return Scene(image, tuple(objects))

    def _targets(self, index: int, count: int, draws: Draws) -> list[Art]:
        """Choose targets: labels run through all classes, from another start in every hundred; the second is random."""
        block, place = divmod(index, len(CLASS_NAMES))
        start = Draws(self.seed, block).integer(0, len(CLASS_NAMES) - 1)
        first = (start + 37 * place) % len(CLASS_NAMES)  # 37 and 100 have no common divisor
        labels = [first, (first + draws.integer(1, len(CLASS_NAMES) - 1)) % len(CLASS_NAMES)][:count]
        return [self._art("targets", CLASS_NAMES[label], label, draws) for label in labels]

    def _distractors(self, count: int, draws: Draws) -> list[Art]:
        """Choose different distractor classes, of those that exist in all styles of the family."""
        styles = STYLES[self.family]
        names = [name for name, art in catalogue()["distractors"].items() if all(style in art for style in styles)]
        chosen = [names.pop(draws.integer(0, len(names) - 1)) for _ in range(count)]
        return [self._art("distractors", name, -1, draws) for name in chosen]

    def _art(self, group: str, name: str, label: int, draws: Draws) -> Art:
        style = draws.choice(STYLES[self.family])
        return Art(label, name, style, draws.choice(catalogue()[group][name][style]))


def _shuffle_indices(count: int, draws: Draws) -> list[int]:
    """Return the indices below ``count`` in random order (Fisher and Yates)."""
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = draws.integer(0, i)
        order[i], order[j] = order[j], order[i]
    return order
