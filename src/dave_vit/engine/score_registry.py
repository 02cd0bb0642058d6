"""The registry of named scores, and the classes and boxes that their texts refer to."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dave_vit._internal.registry import Registry
from dave_vit.errors import OptionError

Box = tuple[float, float, float, float]
"""(x0, y0, x1, y1): fractions of the image's width and height, or pixels of a photograph where stated."""

SCORES: Registry[Any] = Registry("score")
"""Named scores: frozen dataclasses that are called with the model's output, such as ``Detection``.

A class attribute ``form`` shows how the score is written, the first line of the docstring is its summary, and the class
method ``parse(text, context)`` makes one from what follows the first colon; ValueError means that the form is wrong.
"""


@dataclass(frozen=True)
class ScoreContext:
    """What the text of a score refers to.

    Attributes:
        model: a loaded model, with class names, spec and preprocessing.
        geometry: where the model's input lies in the photograph; boxes are written in pixels of the photograph.
    """

    model: Any
    geometry: Any

    def class_index(self, text: str) -> int:
        """Return the index of a class that is given by its index or its name."""
        if text.isdigit():
            return int(text)
        names = [name.lower() for name in self.model.class_names]
        if text.lower() not in names:
            raise OptionError(f"class {text!r} is not one of {self.model.spec}; give its name, or its index")
        return names.index(text.lower())

    def box(self, text: str) -> Box:
        """Return a box that is given in pixels of the photograph, as fractions of the input."""
        return self.geometry.box_to_input(parse_box(text))  # type: ignore[no-any-return]


def parse_box(text: str) -> Box:
    """Parse "x0,y0,x1,y1"; raises ValueError where these are not four finite numbers."""
    x0, y0, x1, y1 = (float(part) for part in text.split(","))
    if not all(map(math.isfinite, (x0, y0, x1, y1))):
        raise ValueError(f"the corners of the box {text} are not finite")
    return (x0, y0, x1, y1)


def box_mask(box: Box, size: tuple[int, int]) -> Tensor:
    """Return how much of each pixel lies within a box: ``[H, W]``, from 0 to 1."""
    columns, rows = (_pixel_cover(box[axis], box[axis + 2], size[1 - axis]) for axis in (0, 1))
    return rows[:, None] * columns


def _pixel_cover(low: float, high: float, extent: int) -> Tensor:
    edges = torch.arange(extent + 1, dtype=torch.float64)
    inside = edges.clamp(low * extent, high * extent)
    return inside[1:] - inside[:-1]


def check_box(box: Box) -> None:
    """Raise OptionError unless a box is given as fractions of the image and not empty."""
    if len(box) != 4 or not (0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1):
        raise OptionError(f"box {tuple(box)}; expected (x0, y0, x1, y1) as fractions of the image, x0 < x1 and y0 < y1")


def mask_bounds(places: Tensor) -> Tensor:
    """Return the corners that masks ``[B, H, W]`` cover, as fractions ``[B, 4]``; the whole image for empty masks."""
    from torchvision.ops import masks_to_boxes

    inside = places > 0.5
    pixels = masks_to_boxes(inside | ~inside.any((1, 2), keepdim=True))  # [B, 4]: the first and the last ones
    height, width = places.shape[1:]
    bounds: Tensor = (pixels + pixels.new_tensor([0, 0, 1, 1])) / pixels.new_tensor([width, height, width, height])
    return bounds


def box_overlap(boxes: Tensor, corners: Tensor) -> Tensor:
    """Compute the intersection over union of boxes ``[B, N, 4]`` (centre, size) with corners ``[B, 4]``: ``[B, N]``."""
    from torchvision.ops import box_convert, box_iou

    sized = torch.cat([boxes[..., :2], boxes[..., 2:].clamp(min=0)], -1)
    overlap: Tensor = box_iou(box_convert(sized, "cxcywh", "xyxy"), corners.unsqueeze(1))
    return overlap.squeeze(-1)
