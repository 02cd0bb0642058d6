"""From a photograph to the model's input and back: where preprocessing puts each pixel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dave_vit.engine.scores import Box
from dave_vit.errors import ModelError, OptionError
from dave_vit.models.adapter import Preprocessing

_INSIDE = (0.02, 0.98)  # what is nearer to an edge may be mixed with padding, or cut off


@dataclass(frozen=True)
class Geometry:
    """How an input lies in the photograph that it was made of: resized, cropped, padded, each axis by itself.

    Places are in pixels, from 0 at the left or upper edge of the first pixel.

    Attributes:
        photo: width and height of the photograph.
        inputs: width and height of the input.
        step: pixels of the photograph to one of the input, along x and y.
        start: where in the photograph the input begins, x and y; negative where there is padding.
    """

    photo: tuple[int, int]
    inputs: tuple[int, int]
    step: tuple[float, float]
    start: tuple[float, float]

    @classmethod
    def of(cls, preprocess: Preprocessing, photo: tuple[int, int]) -> Geometry:
        """Found by preprocessing a picture of that width and height whose colours say where they are."""
        seen = preprocess.picture(preprocess(_ramps(photo)))[0].double()  # [3, H, W]
        real = seen[2] > 0.99  # the third colour is full but in padding
        axes = [_line(seen[axis].T if axis else seen[axis], real.T if axis else real, photo[axis]) for axis in (0, 1)]
        (step_x, start_x), (step_y, start_y) = axes
        return cls(photo, (seen.shape[2], seen.shape[1]), (step_x, step_y), (start_x, start_y))

    @property
    def seen(self) -> Box:
        """What the input shows (x0, y0, x1, y1), in pixels of the photograph and cut at its edges."""
        low = [max(0.0, self.start[axis]) for axis in (0, 1)]
        ends = [self.start[axis] + self.inputs[axis] * self.step[axis] for axis in (0, 1)]
        return (low[0], low[1], min(float(self.photo[0]), ends[0]), min(float(self.photo[1]), ends[1]))

    def within(self, photo: tuple[int, int], corner: tuple[int, int]) -> Geometry:
        """The same in a larger photograph, of which this one is a part with its upper left corner there."""
        start = (self.start[0] + corner[0], self.start[1] + corner[1])
        return Geometry(photo, self.inputs, self.step, start)

    def resized(self, photo: tuple[int, int]) -> Geometry:
        """The same in the photograph resized to this width and height."""
        by = [photo[axis] / self.photo[axis] for axis in (0, 1)]
        step, start = ((pair[0] * by[0], pair[1] * by[1]) for pair in (self.step, self.start))
        return Geometry(photo, self.inputs, step, start)

    def box(self, corners: Box) -> Box:
        """A box (x0, y0, x1, y1) of the photograph, in its pixels, as fractions of the input."""
        placed = [
            min(max((corner - self.start[axis % 2]) / self.step[axis % 2] / self.inputs[axis % 2], 0.0), 1.0)
            for axis, corner in enumerate(corners)
        ]
        if placed[0] >= placed[2] or placed[1] >= placed[3]:
            raise OptionError(
                f"box {','.join(f'{corner:g}' for corner in corners)} is empty or outside of what the model sees; give "
                f"x0,y0,x1,y1 in pixels of the {self.photo[0]} x {self.photo[1]} photograph"
            )
        return (placed[0], placed[1], placed[2], placed[3])

    def to_photo(self, maps: Tensor) -> Tensor:
        """Maps ``[..., H', W']`` of the input as maps ``[..., H, W]`` of the photograph; zero where it was cut off."""
        at = [
            ((torch.arange(self.photo[axis]) + 0.5 - self.start[axis]) / self.step[axis]) / self.inputs[axis] * 2 - 1
            for axis in (0, 1)
        ]
        grid = torch.stack(torch.meshgrid(*at, indexing="xy"), -1).to(maps)  # [H, W, 2], as (x, y)
        flat = maps.reshape(1, -1, *maps.shape[-2:])
        read = F.grid_sample(flat, grid[None], mode="bilinear", padding_mode="zeros", align_corners=False)
        return read.reshape(*maps.shape[:-2], *grid.shape[:2])


def _ramps(photo: tuple[int, int]) -> Image.Image:
    """A picture that is the redder the further right, and the greener the further down."""
    width, height = photo
    x = np.broadcast_to((np.arange(width) + 0.5) / width, (height, width))
    y = np.broadcast_to(((np.arange(height) + 0.5) / height)[:, None], (height, width))
    return Image.fromarray((np.stack([x, y, np.ones_like(x)], -1) * 255).round().astype(np.uint8))


def _line(ramp: Tensor, real: Tensor, extent: int) -> tuple[float, float]:
    """Step and start along the last axis of a ramp ``[rows, N]`` from 0 to 1."""
    weight = real & (ramp > _INSIDE[0]) & (ramp < _INSIDE[1])
    counts = weight.sum(0)
    used = counts > 0
    if int(used.sum()) < 2:
        raise ModelError("the preprocessing of this model cannot be followed back to the photograph")
    values = (torch.where(weight, ramp, 0).sum(0) / counts.clamp(min=1))[used] * extent
    centres = torch.arange(ramp.shape[1], dtype=torch.float64)[used] + 0.5
    spread = centres - centres.mean()
    step = float((spread * values).sum() / spread.square().sum())
    return step, float(values.mean() - step * centres.mean())
