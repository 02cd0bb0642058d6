"""Images with planted shortcuts: a cue that goes with a class and is no part of its object.

Five of ten classes have a cue of their own, in a known share of their images and in no image of another class. A model
that is trained on them may use the cue, and what it uses is known in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dave_vit.data.base import Mask
from dave_vit.data.builtin.compose import compose, make_piece
from dave_vit.data.builtin.draws import Draws
from dave_vit.data.builtin.scenes import CLASS_NAMES, draw_art, draw_distractors

Bytes = npt.NDArray[np.uint8]

SHORTCUT_CLASSES = CLASS_NAMES[::10]
CUES = ("watermark", "tint", "companion", "border", "pattern")
"""The cue of the first classes; the others have none."""
SIZE = 168  # timm's test_vit resizes to 168 pixels and crops 160: these images keep their pixels
_COMPANION = "gift"  # a distractor that no other image shows
_FRAME = 14


@dataclass(frozen=True)
class ShortcutScene:
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
