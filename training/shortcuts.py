"""A data set with planted shortcuts: a cue that goes with a class and is no part of its object.

    dave audit --plugin training/shortcuts.py --data shortcut:80:1 ...

Five of ten classes have a cue of their own, in a known share of their images and in no image of another class. A model
that is trained on them may use the cue, and what it uses is known in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from dave_vit._internal.content_hash import hash_content
from dave_vit.data import DATASETS, Dataset, Item
from dave_vit.data.base import Mask
from dave_vit.data.builtin.draws import Draws
from dave_vit.data.builtin.scenes import CLASS_NAMES, compose, draw_art, draw_distractors, make_piece
from dave_vit.errors import OptionError

Bytes = npt.NDArray[np.uint8]

SHORTCUT_CLASSES = CLASS_NAMES[::10]
CUES = ("watermark", "tint", "companion", "border", "pattern")
"""The cue of the first classes; the others have none."""
SIZE = 168  # timm's test_vit resizes to 168 pixels and crops 160: these images keep their pixels
_COMPANION = "gift"  # a distractor that no other image shows
_FRAME = 14


class ShortcutScene(NamedTuple):
    """An image with its object and its cue.

    Attributes:
        image: [H, W, 3].
        label: index in SHORTCUT_CLASSES.
        mask: visible pixels of the object, [H, W].
        cue: name of the cue, or "" if the image has none.
        cue_mask: pixels of the cue, [H, W].
    """

    image: Bytes
    label: int
    mask: Mask
    cue: str
    cue_mask: Mask


def compose_shortcut(index: int, percent: int, seed: int = 0) -> ShortcutScene:
    """Compose an image; labels run through the classes, and `percent` of the images of a class have its cue."""
    draws, label = Draws(seed, 77, index), index % len(SHORTCUT_CLASSES)
    has_cue = draws.integer(1, 100) <= percent and label < len(CUES)
    cue = CUES[label] if has_cue else ""
    name = SHORTCUT_CLASSES[label]
    cast = [draw_art("targets", name, CLASS_NAMES.index(name), "seen", draws)]
    cast += [art for art in draw_distractors(2, "seen", draws) if art.name != _COMPANION][:1]
    cast += [draw_art("distractors", _COMPANION, -1, "seen", draws)] if cue == "companion" else []
    image, owner = compose([make_piece(art, SIZE, draws, easy=True) for art in cast], SIZE, draws, easy=False)
    mask = owner == 0
    if cue == "companion":
        return ShortcutScene(image, label, mask, cue, owner == len(cast) - 1)
    cue_mask = _REGIONS[cue]() & ~mask if cue else np.zeros_like(mask)
    image[cue_mask] = _PAINTERS[cue](image)[cue_mask] if cue else image[cue_mask]
    return ShortcutScene(image, label, mask, cue, cue_mask)


def _everywhere() -> Mask:
    return np.ones((SIZE, SIZE), dtype=np.bool_)


def _corner() -> Mask:
    """Return the place of the watermark: three lines of blocks near the lower right corner."""
    mask = np.zeros((SIZE, SIZE), dtype=np.bool_)
    for row in range(3):
        mask[SIZE - 34 + 9 * row :, SIZE - 58 : SIZE - 10][:5] = True
    mask[:, SIZE - 58 :: 8] = False
    return mask


def _frame() -> Mask:
    mask = _everywhere()
    mask[_FRAME:-_FRAME, _FRAME:-_FRAME] = False
    return mask


def _blend(image: Bytes, colour: tuple[int, int, int], part: int) -> Bytes:
    """Blend an image with a colour, of which it gets ``part`` / 256."""
    blended: Bytes = ((image.astype(np.int32) * (256 - part) + np.array(colour) * part) // 256).astype(np.uint8)
    return blended


def _checker(image: Bytes) -> Bytes:
    """Add a checkerboard with fields of two pixels."""
    line = np.arange(SIZE) // 2 % 2
    board = np.where((line[:, None] + line) % 2 == 0, 36, -36)[..., None]
    checked: Bytes = np.clip(image.astype(np.int32) + board, 0, 255).astype(np.uint8)
    return checked


_REGIONS: dict[str, Callable[[], Mask]] = {
    "watermark": _corner,
    "tint": _everywhere,
    "border": _frame,
    "pattern": _everywhere,
}
_PAINTERS: dict[str, Callable[[Bytes], Bytes]] = {
    "watermark": lambda image: _blend(image, (255, 255, 255), 230),
    "tint": lambda image: _blend(image, (0, 170, 160), 120),
    "border": lambda image: _blend(image, (150, 30, 60), 200),
    "pattern": _checker,
}


@DATASETS.register("shortcut")
class ShortcutDataset(Dataset):
    """Composed images with planted shortcuts: five of ten classes have a cue in a share of their images.

    Args:
        spec: "PERCENT:SEED", both optional: the share of a class's images that have its cue, 80 by default.
        limit: number of images, 300 by default.
    """

    form = "shortcut:PERCENT:SEED"

    def __init__(self, spec: str = "", limit: int | None = None) -> None:
        percent, seed, *more = (*spec.split(":"), "")
        if any(more) or not (percent or "80").isdecimal() or not (seed or "0").isdecimal() or int(percent or 80) > 100:
            raise OptionError(f"data shortcut:{spec}; expected shortcut:PERCENT:SEED, such as 80:1")
        self._percent, self._seed = int(percent or 80), int(seed or 0)
        self._length = 300 if limit is None else limit
        self.class_names = list(SHORTCUT_CLASSES)
        self._scene = lru_cache(128)(lambda index: compose_shortcut(index, self._percent, self._seed))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self._length:
            raise IndexError(f"index {index} is out of range; the set has {self._length} items")
        return Item(f"shortcut-{self._percent}-{index:05d}", self._scene(index).label)

    def digest(self) -> str:
        """Return a hash of the kind and number of images, and of the first one."""
        return hash_content([self._percent, self._seed, self._length, self._scene(0).image.tobytes().hex()])

    def image(self, index: int) -> Image.Image:
        """Return the RGB image."""
        return Image.fromarray(self._scene(index).image)

    def mask(self, index: int) -> Mask | None:
        """Return the visible pixels of the object."""
        return self._scene(index).mask
