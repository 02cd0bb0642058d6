"""Warps of views: ranges of flip, rotation, scale and translation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dave_vit.errors import OptionError
from dave_vit.neighborhood.resample import Size
from dave_vit.neighborhood.warp import Warp, affine_matrix


@dataclass(frozen=True)
class Spatial:
    """Ranges from which a view's warp is drawn.

    Args:
        flip: probability of a left-right flip.
        rotation: the angle is drawn from U(-rotation, rotation), in degrees.
        scale: (low, high); the factor is drawn from U(low, high).
        translation: the shift is drawn from U(-translation, translation) of each side.
        wrap: shift by whole pixels that come back at the other side, instead of filling up with zeros.
    """

    flip: float = 0.5
    rotation: float = 20.0
    scale: tuple[float, float] = (1.0, 1.0)
    translation: float = 0.1
    wrap: bool = True

    draws: ClassVar[int] = 5  # uniform numbers that one warp takes

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise OptionError(f"flip probability {self.flip}; expected a number from 0 to 1")
        if not 0 <= self.rotation <= 180:
            raise OptionError(f"rotation {self.rotation}; expected degrees from 0 to 180")
        if not 0 < self.scale[0] <= self.scale[1] < float("inf"):
            raise OptionError(f"scale {self.scale}; expected (low, high) with 0 < low <= high")
        if not 0 <= self.translation < 1:
            raise OptionError(f"translation {self.translation}; expected a fraction of the side, from 0 to below 1")

    def warp(self, uniform: Tensor, size: Size) -> Warp:
        """Return the warps of uniform draws [n,5] in float64, for images of size (H, W)."""
        flip, angle, factor = uniform[:, :3].unbind(1)
        low, high = self.scale
        side = torch.tensor([size[1], size[0]], dtype=torch.float64, device="cpu")  # (x, y)
        shift = (2 * uniform[:, 3:] - 1) * self.translation * side  # [n,2]
        matrix = affine_matrix(
            size,
            flip=flip < self.flip,
            rotation=(2 * angle - 1) * self.rotation,
            scale=low + factor * (high - low),
            translation=torch.zeros_like(shift) if self.wrap else shift,
        )
        roll = shift.round().flip(1).to(torch.int64)  # (dy, dx)
        return Warp(matrix, roll if self.wrap else torch.zeros_like(roll))
