"""Where the pixels of an image land in the model's input, found by showing ramps to the model's own preprocessing.

Boxes and masks must go through the same resize and crop as the image. Every library describes those steps in its own
way, and some hide them in functions. So they are measured: a horizontal and a vertical ramp of grey, as large as the
image, go through the preprocessing, and a straight line is fitted to what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dave_vit.data.base import Box, Mask
from dave_vit.errors import DataError

_FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Axis:
    """One side: source = scale * output + offset, both measured from the first pixel's edge.

    Attributes:
        size: pixels of the output.
        scale: source pixels per output pixel.
        offset: where the output's first edge lies in the source.
    """

    size: int
    scale: float
    offset: float

    def to_output(self, source: float) -> float:
        """Where a source coordinate lands."""
        return (source - self.offset) / self.scale

    def to_source(self) -> _FloatArray:
        """Where the centre of each output pixel was read: [size]."""
        return np.asarray(self.scale * (np.arange(self.size) + 0.5) + self.offset, dtype=np.float64)


@dataclass(frozen=True)
class Placement:
    """Resize and crop of images of one size."""

    x: Axis
    y: Axis

    def boxes(self, boxes: Sequence[Box]) -> Mask:
        """The union of boxes, [H,W]: pixels whose centre lies inside one.

        A box too small to hold a centre marks the pixel that holds its own; a box outside of the crop marks none.
        """
        region = np.zeros((self.y.size, self.x.size), dtype=np.bool_)
        for left, top, right, bottom in boxes:
            region[_span(self.y, top, bottom), _span(self.x, left, right)] = True
        return region

    def mask(self, mask: Mask) -> Mask:
        """A mask of the original image, [H,W], read at the centre of each output pixel; false outside."""
        rows, columns = (np.floor(axis.to_source()).astype(int) for axis in (self.y, self.x))
        inside = np.outer((rows >= 0) & (rows < mask.shape[0]), (columns >= 0) & (columns < mask.shape[1]))
        picked = mask[np.ix_(rows.clip(0, mask.shape[0] - 1), columns.clip(0, mask.shape[1] - 1))]
        return np.asarray(picked & inside)


class Placements:
    """The placement of images of any size under one preprocessing; measured once per size.

    Args:
        preprocess: an RGB picture to [1,C,H,W] or [C,H,W].
    """

    def __init__(self, preprocess: Callable[[Any], Tensor]) -> None:
        self.preprocess = preprocess
        self.of_size = lru_cache(maxsize=4096)(self._measure)

    def _measure(self, width: int, height: int) -> Placement:
        """The placement of images of this width and height."""
        black, white = (self._shown(np.full((height, width), grey, dtype=np.uint8)) for grey in (0, 255))
        x = np.broadcast_to(_ramp(width), (height, width))
        y = np.broadcast_to(_ramp(height)[:, None], (height, width))
        contrast = white - black  # 0 where the picture is padded, below 0 where a channel is inverted
        with np.errstate(invalid="ignore"):  # 0 / 0 in padded rows and columns: no position there
            along_x = ((self._shown(x) - black) * contrast).sum((0, 1)) / (contrast**2).sum((0, 1))  # [W]
            along_y = ((self._shown(y) - black) * contrast).sum((0, 2)) / (contrast**2).sum((0, 2))  # [H]
        return Placement(_fit(along_x * width), _fit(along_y * height))

    def _shown(self, grey: npt.NDArray[np.uint8]) -> _FloatArray:
        """A grey picture through the preprocessing: [C,H,W]."""
        from PIL import Image

        tensor = self.preprocess(Image.fromarray(np.ascontiguousarray(np.repeat(grey[..., None], 3, 2))))
        shown = tensor.detach().cpu().double().numpy()
        return np.asarray(shown.reshape(shown.shape[-3:]))


def _ramp(size: int) -> npt.NDArray[np.uint8]:
    """Grey in proportion to the position of each pixel's centre."""
    return np.rint(255 * (np.arange(size) + 0.5) / size).astype(np.uint8)


def _fit(source: _FloatArray) -> Axis:
    """The straight line through the source positions of the output pixels; the ends, where filters bend, left out."""
    at = np.arange(len(source)) + 0.5
    shown = np.flatnonzero(np.isfinite(source))
    margin = len(shown) // 10
    inner = shown[margin : len(shown) - margin]
    if len(inner) < 2:
        raise DataError("the preprocessing shows no two pixels of an image; expected a resize and a crop")
    scale, offset = np.polyfit(at[inner], source[inner], 1)
    error = float(np.abs(scale * at[inner] + offset - source[inner]).max())
    if scale <= 0 or error > 2 + 2 * scale:
        raise DataError(f"the preprocessing is no resize and crop: a straight line misses by {error:.1f} pixels")
    return Axis(len(source), float(scale), float(offset))


def _span(axis: Axis, low: float, high: float) -> slice:
    """Output pixels whose centres lie between two source coordinates."""
    start, stop = axis.to_output(low), axis.to_output(high)
    if stop <= 0 or start >= axis.size or stop <= start:
        return slice(0, 0)
    first, last = int(np.ceil(start - 0.5)), int(np.ceil(stop - 0.5))
    if last <= first:
        first = min(max(int((start + stop) / 2), 0), axis.size - 1)
        last = first + 1
    return slice(max(first, 0), min(last, axis.size))
