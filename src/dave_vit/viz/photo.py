"""Maps on the whole photograph: what a model sees is often only a part of it, or squashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from dave_vit.data.geometry import Geometry
from dave_vit.viz.colors import Array
from dave_vit.viz.panels import Panel, Scales, View
from dave_vit.viz.rendering import (
    ImageLike,
    MapLike,
    as_image,
    as_map,
    blend,
    overlay,
    scale_map,
    smooth_for_overlay,
    to_pillow,
)

_WHOLE = 0.98  # share of the photograph from which on it counts as seen whole
_LONGEST = 1600  # pixels of a side of what is drawn
_SIDE = 448  # pixels of the shorter side of an input, at least, when it is drawn large
_MAPS = ("map", "standard_error", "signed", "sureness")
_UNSEEN = 0.65  # how much of what was cut off is white


@dataclass(frozen=True)
class Photo:
    """A photograph, and where in it the model looked.

    Attributes:
        image: the photograph.
        parts: how each input lies in it; one, but for tiles.
    """

    image: Image.Image
    parts: tuple[Geometry, ...]

    @property
    def boxes(self) -> list[list[float]]:
        """What each input shows (left, top, right, bottom), in pixels of the photograph."""
        return [[round(side, 1) for side in part.visible_box] for part in self.parts]

    @cached_property
    def seen(self) -> float:
        """The share of the photograph's area that the model saw."""
        width, height = self.image.size
        covered = np.zeros((min(height, 400), min(width, 400)), dtype=bool)
        for left, top, right, bottom in (part.visible_box for part in self.parts):
            rows, columns = (
                slice(round(low / side * cells), round(high / side * cells))
                for low, high, side, cells in (
                    (top, bottom, height, covered.shape[0]),
                    (left, right, width, covered.shape[1]),
                )
            )
            covered[rows, columns] = True
        return float(covered.mean())

    @property
    def whole(self) -> bool:
        """Whether nothing worth mentioning was cut off."""
        return self.seen >= _WHOLE

    @property
    def plain(self) -> bool:
        """Whether there is one input, in the photograph's own proportions and without margins."""
        (across, down), margins = self.parts[0].scale, max(-start for start in self.parts[0].offset)
        return len(self.parts) == 1 and abs(across / down - 1) < 0.02 and margins < 0.02 * max(self.image.size)

    def resized(self, zoom: float = 1.0) -> Photo:
        """The same with about `zoom` pixels to one of the input, and at most 1600 along its longer side."""
        steps = [zoom / min(part.scale) for part in self.parts]
        by = min(max(steps), _LONGEST / max(self.image.size))
        width, height = (max(1, round(side * by)) for side in self.image.size)
        image = self.image.resize((width, height), Image.Resampling.LANCZOS)
        return Photo(image, tuple(part.resize_photo((width, height)) for part in self.parts))

    def place(self, maps: Sequence[MapLike]) -> Tensor:
        """Maps of the inputs as one of the photograph, [H, W]: averages where tiles overlap, 0 where nobody looked."""
        total = weight = torch.zeros(())
        for part, values in zip(self.parts, maps, strict=True):
            tensor = as_map(values)
            total = total + part.to_photo(tensor)
            weight = weight + part.to_photo(torch.ones_like(tensor))
        return torch.where(weight > 0.5, total / weight.clamp(min=0.5), 0)

    def frame_seen_area(self, colours: ImageLike) -> Array:
        """A picture of the photograph's proportions with a frame around what was seen, and the rest pale."""
        array = as_image(colours)
        if self.whole:
            return array
        width, height = array.shape[1], array.shape[0]
        boxes = [part.resize_photo((width, height)).visible_box for part in self.parts]
        pale = _UNSEEN + (1 - _UNSEEN) * array
        for left, top, right, bottom in boxes:
            area = np.s_[round(top) : round(bottom), round(left) : round(right)]
            pale[area] = array[area]
        shown = to_pillow(pale)
        pen, thick = ImageDraw.Draw(shown), max(1, round(min(shown.size) / 200))
        for box in boxes if len(boxes) == 1 else []:
            pen.rectangle([round(box[0]), round(box[1]), round(box[2]) - 1, round(box[3]) - 1], None, "#ffffff", thick)
            outer = [round(box[0]) - thick, round(box[1]) - thick, round(box[2]) - 1 + thick, round(box[3]) - 1 + thick]
            pen.rectangle(outer, None, "#40175e", thick)
        return as_image(shown)

    def panels(self, groups: Sequence[Sequence[Panel]]) -> list[Panel]:
        """One panel a target, for looking at: of several or squashed inputs in the photograph's proportions.

        Args:
            groups: for each target the panels of all parts.
        """
        if self.plain:
            return [parts[0] for parts in groups]
        small, found = self.resized(), []
        for parts in groups:
            maps: dict[str, Any] = {name: small._placed(parts, name) for name in _MAPS}
            found.append(replace(parts[0], **maps))
        return found

    def _placed(self, panels: Sequence[Panel], name: str) -> Tensor | None:
        maps = [getattr(panel, name) for panel in panels]
        return None if maps[0] is None else self.place(maps)


def overlay_on_photo(photo: Photo, groups: Sequence[Sequence[Panel]], view: View, scales: Scales) -> Image.Image:
    """Maps over the whole photograph; several targets in several hues, and where they are signed beside each other.

    Args:
        photo: with the parts of it that the model saw.
        groups: for each target the panels of all parts.
        view: what speaks for the target, or that with what speaks against it.
        scales: one for all targets, or one for each.
    """
    signed = view == "signed"
    large = photo.resized(-(-_SIDE // min(photo.parts[0].input_size)))
    softened = [[smooth_for_overlay(panel.values(view), signed=signed) for panel in parts] for parts in groups]
    every = [values for parts in softened for values in parts]
    shown = [
        scale_map(large.place(parts), signed=signed, like=every if scales == "shared" else parts)  # type: ignore[arg-type]
        for parts in softened
    ]
    if len(shown) > 1 and not signed:
        return to_pillow(large.frame_seen_area(blend(large.image, shown)))
    return to_pillow(np.concatenate([large.frame_seen_area(overlay(large.image, each)) for each in shown], 1))
