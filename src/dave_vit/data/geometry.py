"""Where the pixels of a photograph are in the model's input, and back: resize, crop and padding.

Boxes, masks and maps must go through the same resize and crop as the image. Every library describes those steps in
its own way, and some hide them in functions. So they are measured: a horizontal and a vertical ramp of grey, as large
as the photograph, go through the preprocessing, and a straight line is fitted to the result.

Coordinates are in pixels, from 0 at the left or upper edge of the first pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dave_vit.data.base import Box, Mask
from dave_vit.errors import DataError, OptionError

Preprocess = Callable[[Any], Tensor]
"""From an RGB image to ``[1, C, H, W]`` or ``[C, H, W]``."""
_FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Axis:
    """One side of an image: photo = scale * input + offset.

    Attributes:
        photo: pixels of the photograph.
        size: pixels of the input.
        scale: photo pixels per input pixel.
        offset: where the input starts in the photograph; negative where there is padding.
    """

    photo: int
    size: int
    scale: float
    offset: float

    def to_input(self, photo: Any) -> Any:
        """Convert photo coordinates to input coordinates."""
        return (photo - self.offset) / self.scale

    def to_photo(self, position: Any) -> Any:
        """Convert input coordinates to photo coordinates."""
        return self.scale * position + self.offset

    def span(self, low: float, high: float) -> slice:
        """Return the input pixels whose centres lie between two photo coordinates.

        A span too small to hold a centre is the pixel that holds its own middle.
        """
        start, stop = self.to_input(low), self.to_input(high)
        if stop <= 0 or start >= self.size or stop <= start:
            return slice(0, 0)
        first, last = int(np.ceil(start - 0.5)), int(np.ceil(stop - 0.5))
        if last <= first:
            first = min(max(int((start + stop) / 2), 0), self.size - 1)
            last = first + 1
        return slice(max(first, 0), min(last, self.size))


@dataclass(frozen=True)
class Geometry:
    """How the model's input lies in a photograph: resized, cropped and padded, each axis by itself."""

    x: Axis
    y: Axis

    @classmethod
    def measure(cls, preprocess: Preprocess, photo_size: tuple[int, int]) -> Geometry:
        """Measure the geometry of photographs of this width and height."""
        width, height = photo_size
        black, white, x, y = (_render(preprocess, image) for image in ramp_images(photo_size))
        contrast = white - black  # 0 where the image is padded, below 0 where a channel is inverted
        with np.errstate(invalid="ignore"):  # 0 / 0 in padded rows and columns: no position there
            along_x = ((x - black) * contrast).sum((0, 1)) / (contrast**2).sum((0, 1))  # [W]
            along_y = ((y - black) * contrast).sum((0, 2)) / (contrast**2).sum((0, 2))  # [H]
        return cls(_fit_axis(along_x * width, width), _fit_axis(along_y * height, height))

    @classmethod
    def identity(cls, size: tuple[int, int]) -> Geometry:
        """Return the geometry of an input that is the photograph itself."""
        return cls(*(Axis(side, side, 1.0, 0.0) for side in size))

    @property
    def input_size(self) -> tuple[int, int]:
        """Width and height of the input."""
        return self.x.size, self.y.size

    @property
    def scale(self) -> tuple[float, float]:
        """Photo pixels per input pixel along x and y."""
        return self.x.scale, self.y.scale

    @property
    def visible_box(self) -> Box:
        """The part of the photograph that the input shows (x0, y0, x1, y1), in photo pixels."""
        return self.box_to_photo((0.0, 0.0, 1.0, 1.0))

    def within_photo(self, photo_size: tuple[int, int], corner: tuple[int, int]) -> Geometry:
        """Return the geometry in a larger photograph; this one is the part whose upper left corner is given."""
        pairs = zip((self.x, self.y), photo_size, corner, strict=True)
        return Geometry(*(Axis(photo, axis.size, axis.scale, axis.offset + start) for axis, photo, start in pairs))

    def resize_photo(self, photo_size: tuple[int, int]) -> Geometry:
        """Return the geometry in the photograph resized to this width and height."""
        pairs = [(axis, photo, photo / axis.photo) for axis, photo in zip((self.x, self.y), photo_size, strict=True)]
        return Geometry(*(Axis(photo, axis.size, axis.scale * by, axis.offset * by) for axis, photo, by in pairs))

    def box_to_photo(self, box: Box) -> Box:
        """Convert a box (x0, y0, x1, y1) in fractions of the input to photo pixels, clipped to the photograph."""
        corners = zip((self.x, self.y, self.x, self.y), box, strict=True)
        x0, y0, x1, y1 = (float(np.clip(axis.to_photo(part * axis.size), 0, axis.photo)) for axis, part in corners)
        return (x0, y0, x1, y1)

    def box_to_input(self, box: Box) -> Box:
        """Convert a box (x0, y0, x1, y1) in photo pixels to fractions of the input, clipped to the input."""
        corners = zip((self.x, self.y, self.x, self.y), box, strict=True)
        x0, y0, x1, y1 = (float(np.clip(axis.to_input(corner) / axis.size, 0, 1)) for axis, corner in corners)
        if x0 >= x1 or y0 >= y1:
            given = ",".join(f"{corner:g}" for corner in box)
            how = f"give x0,y0,x1,y1 in pixels of the {self.x.photo} x {self.y.photo} photograph"
            raise OptionError(f"box {given} is empty or outside of what the model sees; {how}")
        return (x0, y0, x1, y1)

    def boxes_to_mask(self, boxes: Sequence[Box]) -> Mask:
        """Return the union of boxes in photo pixels as a mask of the input, ``[H, W]``.

        A box too small to hold the centre of an input pixel marks one pixel; a box outside of the crop marks none.
        """
        mask = np.zeros((self.y.size, self.x.size), dtype=np.bool_)
        for left, top, right, bottom in boxes:
            mask[self.y.span(top, bottom), self.x.span(left, right)] = True
        return mask

    def mask_to_input(self, mask: Mask) -> Mask:
        """Sample a mask of the photograph, ``[H, W]``, at the centre of each input pixel; False outside."""
        rows, columns = (np.floor(axis.to_photo(np.arange(axis.size) + 0.5)).astype(int) for axis in (self.y, self.x))
        inside = np.outer((rows >= 0) & (rows < mask.shape[0]), (columns >= 0) & (columns < mask.shape[1]))
        values = mask[np.ix_(rows.clip(0, mask.shape[0] - 1), columns.clip(0, mask.shape[1] - 1))]
        return np.asarray(values & inside)

    def to_photo(self, maps: Tensor) -> Tensor:
        """Resample maps ``[..., H', W']`` of the input to the photograph ``[..., H, W]``; zero where it was cut off."""
        axes = (axis.to_input(torch.arange(axis.photo) + 0.5) / axis.size * 2 - 1 for axis in (self.x, self.y))
        positions = torch.stack(torch.meshgrid(*axes, indexing="xy"), -1).to(maps)  # [H, W, 2], as (x, y)
        flat = maps.reshape(1, -1, *maps.shape[-2:])
        sampled = F.grid_sample(flat, positions[None], mode="bilinear", padding_mode="zeros", align_corners=False)
        return sampled.reshape(*maps.shape[:-2], *positions.shape[:2])


class GeometryCache:
    """The geometries of one preprocessing, measured once per photo size."""

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess
        self.get = lru_cache(maxsize=4096)(lambda width, height: Geometry.measure(preprocess, (width, height)))


def crop_middle(images: Tensor, size: Sequence[int]) -> Tensor:
    """Return the middle of images ``[..., H, W]``."""
    top, left = ((whole - part) // 2 for whole, part in zip(images.shape[-2:], size, strict=True))
    return images[..., top : top + size[0], left : left + size[1]]


def ramp_images(size: tuple[int, int]) -> Iterator[Image.Image]:
    """Return images that are black, white, and grey in proportion to x and to y of each pixel's centre."""
    width, height = size
    x, y = (np.rint(255 * (np.arange(side) + 0.5) / side) for side in size)
    for grey in (0, 255, x, y[:, None]):
        yield Image.fromarray(np.full((height, width), grey, dtype=np.uint8)).convert("RGB")


def _render(preprocess: Preprocess, image: Image.Image) -> _FloatArray:
    """Preprocess an image: ``[C, H', W']``."""
    tensor = preprocess(image)
    pixels = tensor.detach().cpu().double().numpy()
    return np.asarray(pixels.reshape(pixels.shape[-3:]))


def _fit_axis(positions: _FloatArray, photo: int) -> Axis:
    """Fit a line to the photo positions of the input pixels; the ends, where filters bend, are left out."""
    size = len(positions)
    if photo == 1:  # a ramp of one pixel has no slope
        return Axis(photo, size, 1 / size, 0.0)
    centres = np.arange(size) + 0.5
    visible = np.flatnonzero(np.isfinite(positions))
    margin = len(visible) // 10
    inner = visible[margin : len(visible) - margin]
    if len(inner) < 2:
        raise DataError("the preprocessing shows no two pixels of an image; expected a resize and a crop")
    scale, offset = np.polyfit(centres[inner], positions[inner], 1)
    error = float(np.abs(scale * centres[inner] + offset - positions[inner]).max())
    if scale <= 0 or error > 2 + 2 * scale + photo / 255:  # a ramp has 256 greys
        raise DataError(f"the preprocessing is not a resize and crop: a straight line misses by {error:.1f} pixels")
    return Axis(photo, size, float(scale), float(offset))
