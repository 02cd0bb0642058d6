"""The embedded benchmark as a data set: one item per target in an image."""

import hashlib
from functools import lru_cache, partial

from PIL import Image

from dave_vit.data.base import Dataset, Item, Mask
from dave_vit.data.builtin.scenes import CLASS_NAMES, Scene, check_scene_options, compose_scene
from dave_vit.data.sets import DATASETS
from dave_vit.errors import OptionError

_SIZE = 224
_CACHED_SCENES = 128  # of a quarter of a megabyte each: item, pixels and mask are read in turn, and again in grids


@DATASETS.register("builtin")
class BuiltinDataset(Dataset):
    """Composed images with exact masks, embedded in the package.

    In images with two targets, each target is an item of its own.

    Args:
        spec: "SPLIT:FAMILY:SEED", all optional. The split is "single", "pair" or "plain". The family is "seen" or
            "unseen": art that the embedded models were trained on, or not. Another seed gives other images.
        limit: number of items, 1000 by default.
    """

    form = "builtin[:single|pair|plain]"

    def __init__(self, spec: str = "", limit: int | None = None) -> None:
        split, family, seed, *more = (*spec.split(":"), "", "")
        if any(more) or not (seed or "0").isdecimal():
            raise OptionError(f"data builtin:{spec}; expected builtin:SPLIT:FAMILY:SEED, such as builtin:single:seen:7")
        self._split, self._family, self._seed = split or "single", family or "seen", int(seed or 0)
        check_scene_options(self._split, _SIZE, self._family)
        compose = partial(compose_scene, split=self._split, size=_SIZE, seed=self._seed, family=self._family)
        self._scene = lru_cache(_CACHED_SCENES)(compose)
        self._targets = 2 if split == "pair" else 1
        self._length = 1000 if limit is None else limit
        self.class_names = list(CLASS_NAMES)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Item:
        scene, scene_index, target_index = self._find(index)
        target = scene.targets[target_index]
        picture = f"{self._split}-{self._family}-{scene_index:05d}"
        name = f"{picture}#{target.name}" if self._targets > 1 else picture
        return Item(name, target.label, (target.box,), picture=picture)

    def digest(self) -> str:
        """Return a hash of the kind and number of images, and of the first one."""
        kind = (self._split, self._family, self._seed, _SIZE, self._length)
        return hashlib.sha256(repr(kind).encode() + self._scene(0).image.tobytes()).hexdigest()

    def image(self, index: int) -> Image.Image:
        """Return the RGB image."""
        return Image.fromarray(self._find(index)[0].image)

    def mask(self, index: int) -> Mask | None:
        """Return the visible pixels of the item's target."""
        scene, _, target_index = self._find(index)
        return scene.targets[target_index].mask

    def _find(self, index: int) -> tuple[Scene, int, int]:
        """Return the scene of an item, the scene's index, and the index of the item's target in it."""
        if not 0 <= index < self._length:
            raise IndexError(f"index {index} is out of range; the set has {self._length} items")
        scene_index, target_index = divmod(index, self._targets)
        return self._scene(scene_index), scene_index, target_index
