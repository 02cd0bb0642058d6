"""Maps on the whole photograph: the input of a model is often only a part of it, or squashed."""

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

_WHOLE = 0.98  # visible share from which on the photograph counts as whole
_MAX_SIDE = 1600  # pixels of what is drawn
_SIDE = 448  # least number of pixels of the shorter side of an input in an overlay
_MAPS = ("map", "standard_error", "signed", "certainty")
_WHITE = 0.65  # share of white in the area that was cut off


@dataclass(frozen=True)
class Photo:
    """A photograph with the areas that the model sees.

    Attributes:
        image: the photograph.
        parts: geometry of each input; one, except for tiles.
    """

    image: Image.Image
    parts: tuple[Geometry, ...]

    @property
    def boxes(self) -> list[list[float]]:
        """Area of each input (left, top, right, bottom), in pixels of the photograph."""
        return [[round(side, 1) for side in part.visible_box] for part in self.parts]

    @cached_property
    def visible_share(self) -> float:
        """Share of the photograph's area that the model sees."""
        width, height = self.image.size
        covered = np.zeros((min(height, 400), min(width, 400)), dtype=bool)
        for left, top, right, bottom in (part.visible_box for part in self.parts):
            down, across = covered.shape[0] / height, covered.shape[1] / width
            covered[round(top * down) : round(bottom * down), round(left * across) : round(right * across)] = True
        return float(covered.mean())

    @property
    def is_plain(self) -> bool:
        """Whether there is one input, in the photograph's own proportions and without margins."""
        (across, down), margins = self.parts[0].scale, max(-start for start in self.parts[0].offset)
        return len(self.parts) == 1 and abs(across / down - 1) < 0.02 and margins < 0.02 * max(self.image.size)

    def resize(self, zoom: float = 1.0) -> Photo:
        """Return a copy with about `zoom` pixels per pixel of the input, and at most 1600 along its longer side."""
        steps = [zoom / min(part.scale) for part in self.parts]
        by = min(max(steps), _MAX_SIDE / max(self.image.size))
        width, height = (max(1, round(side * by)) for side in self.image.size)
        image = self.image.resize((width, height), Image.Resampling.LANCZOS)
        return Photo(image, tuple(part.resize_photo((width, height)) for part in self.parts))

    def place(self, maps: Sequence[MapLike]) -> Tensor:
        """Merge maps of the inputs into one of the photograph, [H, W]: average where tiles overlap, 0 outside."""
        total = weight = torch.zeros(())
        for part, values in zip(self.parts, maps, strict=True):
            tensor = as_map(values)
            total = total + part.to_photo(tensor)
            weight = weight + part.to_photo(torch.ones_like(tensor))
        return torch.where(weight > 0.5, total / weight.clamp(min=0.5), 0)

    def frame_seen_area(self, colours: ImageLike) -> Array:
        """Draw a frame around the area that the model sees in a picture of the photograph, and fade the rest."""
        array = as_image(colours)
        if self.visible_share >= _WHOLE:
            return array
        size = (array.shape[1], array.shape[0])
        boxes = [[round(side) for side in part.resize_photo(size).visible_box] for part in self.parts]
        pale = _WHITE + (1 - _WHITE) * array
        for left, top, right, bottom in boxes:
            pale[top:bottom, left:right] = array[top:bottom, left:right]
        shown = to_pillow(pale)
        pen, thick = ImageDraw.Draw(shown), max(1, round(min(size) / 200))
        if len(boxes) == 1:
            left, top, right, bottom = boxes[0]
            pen.rectangle([left, top, right - 1, bottom - 1], None, "#ffffff", thick)
            outer = [left - thick, top - thick, right - 1 + thick, bottom - 1 + thick]
            pen.rectangle(outer, None, "#40175e", thick)
        return as_image(shown)

    def panels(self, groups: Sequence[Sequence[Panel]]) -> list[Panel]:
        """Return one panel per target; several or squashed inputs become one in the photograph's proportions.

        Args:
            groups: for each target the panels of all parts.
        """
        if self.is_plain:
            return [parts[0] for parts in groups]
        small = self.resize()
        return [small._merge_panels(parts) for parts in groups]

    def _merge_panels(self, parts: Sequence[Panel]) -> Panel:
        known = [name for name in _MAPS if getattr(parts[0], name) is not None]
        maps: dict[str, Any] = {name: self.place([getattr(part, name) for part in parts]) for name in known}
        return replace(parts[0], **maps)


def overlay_on_photo(photo: Photo, groups: Sequence[Sequence[Panel]], view: View, scales: Scales) -> Image.Image:
    """Lay maps over the whole photograph: several targets in several hues, or beside each other if they are signed.

    Args:
        photo: with the areas that the model sees.
        groups: for each target the panels of all parts.
        view: evidence for the target, or evidence for and against it.
        scales: one for all targets, or one for each.
    """
    signed = view == "signed"
    large = photo.resize(-(-_SIDE // min(photo.parts[0].input_size)))
    smoothed = [[smooth_for_overlay(panel.values(view), signed=signed) for panel in parts] for parts in groups]
    every = [values for parts in smoothed for values in parts]
    shown = [
        scale_map(large.place(parts), signed=signed, like=every if scales == "shared" else parts)  # type: ignore[arg-type]
        for parts in smoothed
    ]
    if len(shown) > 1 and not signed:
        return to_pillow(large.frame_seen_area(blend(large.image, shown)))
    return to_pillow(np.concatenate([large.frame_seen_area(overlay(large.image, each)) for each in shown], 1))
