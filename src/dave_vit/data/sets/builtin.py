"""The embedded benchmark as a data set of items: one per target in a picture."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

from dave_vit.data.base import Dataset, Item, Mask
from dave_vit.data.builtin import CLASS_NAMES, BuiltinDataset, Scene
from dave_vit.data.sets import DATASETS
from dave_vit.errors import OptionError

if TYPE_CHECKING:
    from PIL.Image import Image

LENGTH = 1000
_KEPT = 128  # scenes, of a quarter of a megabyte: item, pixels and mask are asked for in turn, and again in grids


class Embedded(Dataset):
    """Composed pictures; in those with two targets, each is an item of its own with its own label and mask.

    Args:
        split: "single", "pair" or "plain".
        family: "seen" or "unseen": art that the embedded models were trained on, or not.
        limit: use the first so many items.
        seed: another one gives other pictures.
    """

    def __init__(self, split: str = "single", family: str = "seen", limit: int | None = None, *, seed: int = 0) -> None:
        self._targets = 2 if split == "pair" else 1
        self._length = LENGTH if limit is None else limit
        pictures = -(-self._length // self._targets)
        self.scenes = BuiltinDataset(split, seed=seed, family=family, length=max(pictures, 1))
        self.class_names = list(CLASS_NAMES)
        self._scene = lru_cache(_KEPT)(self.scenes.__getitem__)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Item:
        scene, number, place = self._find(index)
        target = scene.targets[place]
        picture = f"{self.scenes.split}-{self.scenes.family}-{number:05d}"
        name = f"{picture}#{target.name}" if self._targets > 1 else picture
        left, top, right, bottom = target.box
        return Item(name, target.label, ((left, top, right, bottom),), picture=picture)

    def digest(self) -> str:
        """A hash of the kind and number of pictures, and of the first one."""
        kind = (self.scenes.split, self.scenes.family, self.scenes.seed, self.scenes.size, self._length)
        return hashlib.sha256(repr(kind).encode() + self._scene(0).image.tobytes()).hexdigest()

    def image(self, index: int) -> Image:
        """The picture, RGB."""
        from PIL import Image as images

        return images.fromarray(self._find(index)[0].image)

    def mask(self, index: int) -> Mask | None:
        """The visible pixels of the item's target."""
        scene, _, place = self._find(index)
        return scene.targets[place].mask

    def _find(self, index: int) -> tuple[Scene, int, int]:
        """The scene of an item, the scene's number, and which of its targets the item is."""
        if not 0 <= index < self._length:
            raise IndexError(f"index {index} is out of range; the set has {self._length} items")
        number, place = divmod(index, self._targets)
        return self._scene(number), number, place


@DATASETS.register("builtin")
def open_builtin(rest: str, limit: int | None) -> Embedded:
    """The pictures of a spec such as "builtin:pair" or "builtin:single:seen:7"."""
    split, family, seed, *more = (*rest.split(":"), "", "")
    if any(more) or not (seed or "0").isdecimal():
        raise OptionError(f"data builtin:{rest}; expected builtin:SPLIT:FAMILY:SEED, such as builtin:single:seen:7")
    return Embedded(split or "single", family or "seen", limit, seed=int(seed or 0))
