"""Resample images at the points of an affine map, and the transpose of that.

Pixel centres are at integers, x to the right and y down; the image is zero outside of its pixels. Points that fall on
pixels are read by index, so flips, shifts and the identity are exact; all others are interpolated bilinearly. The
choice is made per sample from its own matrix: what a sample gives does not depend on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import precise_dtype, working_dtype

Size = tuple[int, int]  # (H, W)


class Resampler:
    """Resamples images at ``matrix @ ((p - roll) mod size)`` for every pixel p.

    The points are computed once: a resampler can be reused for other images of the same size, type and device.

    Args:
        matrix: [n,3,3] on the CPU; takes (x, y, 1).
        roll: [n,2] on the CPU; integers (dy, dx).
        size: (H, W) of the images.
        dtype: of the images.
        device: of the images.
    """

    def __init__(self, matrix: Tensor, roll: Tensor, *, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        on_pixels = (matrix == matrix.round()).all(dim=(1, 2))  # [n], known on the host: nothing waits for the device
        self._dtype = working_dtype(dtype)
        self._samplers: list[tuple[Tensor, _Pixels | _Between]] = []  # with the indices of their samples, on the CPU
        for exact, rows in ((True, on_pixels.nonzero()[:, 0]), (False, (~on_pixels).nonzero()[:, 0])):
            if len(rows):
                points = _points(matrix[rows], roll[rows], size, device)
                whole = exact and is_identity(matrix[rows])
                sampler = _Pixels.at(points, whole=whole) if exact else _Between.at(points, self._dtype)
                self._samplers.append((rows, sampler))

    def part(self, start: int, stop: int) -> Resampler:
        """Select the samples ``start`` to ``stop``; nothing is computed again."""
        part = copy(self)
        part._samplers = []
        for rows, sampler in self._samplers:
            first, last = torch.searchsorted(rows, torch.tensor([start, stop])).tolist()
            if first < last:
                part._samplers.append((rows[first:last] - start, sampler.part(first, last)))
        return part

    def read(self, image: Tensor) -> Tensor:
        """Resample images [n,C,H,W] -> [n,C,H,W], computed in float32 or better."""
        return self._each(image, lambda sampler, part: sampler.read(part))

    def spread(self, values: Tensor) -> Tensor:
        """Apply the transpose of ``read`` as a linear map: every value is added where it was read from."""
        return self._each(values, lambda sampler, part: sampler.spread(part))

    def _each(self, image: Tensor, act: Callable[[_Pixels | _Between, Tensor], Tensor]) -> Tensor:
        """Apply to each sample the sampler that its matrix needs."""
        wide = image.to(self._dtype)
        with torch.autocast(image.device.type, enabled=False):
            if len(self._samplers) == 1:
                return act(self._samplers[0][1], wide).to(image.dtype)
            out = torch.empty_like(wide, memory_format=torch.contiguous_format)
            for rows, sampler in self._samplers:
                there = rows.to(wide.device, non_blocking=True)
                out[there] = act(sampler, wide[there])
        return out.to(image.dtype)


@dataclass(frozen=True, eq=False)
class _Pixels:
    """Points that are pixels, or outside of the image.

    Args:
        index: of each point, row by row: [n,1,H*W]; 0 outside.
        inside: whether it is inside, [n,1,H*W]; None where all are.
    """

    index: Tensor
    inside: Tensor | None

    @classmethod
    def at(cls, points: Tensor, *, whole: bool) -> _Pixels:
        """Return the sampler of points [n,H,W,2]; ``whole`` says that all of them are inside."""
        height, width = points.shape[1:3]
        x, y = points.to(torch.int64).flatten(1, 2).unsqueeze(1).unbind(-1)  # [n,1,H*W] each
        if whole:
            return cls(y * width + x, None)
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        return cls(torch.where(inside, y * width + x, 0), inside)

    def part(self, start: int, stop: int) -> _Pixels:
        return _Pixels(self.index[start:stop], None if self.inside is None else self.inside[start:stop])

    def read(self, image: Tensor) -> Tensor:
        flat = image.flatten(2)  # [n,C,H*W]
        return self._zero_outside(flat.gather(2, self.index.expand_as(flat))).view(image.shape)

    def spread(self, values: Tensor) -> Tensor:
        flat = self._zero_outside(values.flatten(2))  # [n,C,H*W]
        return torch.zeros_like(flat).scatter_add(2, self.index.expand_as(flat), flat).view(values.shape)

    def _zero_outside(self, flat: Tensor) -> Tensor:
        return flat if self.inside is None else torch.where(self.inside, flat, 0)


@dataclass(frozen=True, eq=False)
class _Between:
    """Points between pixels, read by bilinear interpolation.

    Args:
        grid: as ``grid_sample`` takes them: [n,H,W,2].
    """

    grid: Tensor

    @classmethod
    def at(cls, points: Tensor, dtype: torch.dtype) -> _Between:
        """Return the sampler of points [n,H,W,2]."""
        x, y = points.unbind(-1)  # [n,H,W] each
        height, width = x.shape[1:]
        # grid_sample takes pixel k of n at (2k + 1) / n - 1, which also holds for images one pixel wide.
        return cls(torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], dim=-1).to(dtype))

    def part(self, start: int, stop: int) -> _Between:
        return _Between(self.grid[start:stop])

    def read(self, image: Tensor) -> Tensor:
        return F.grid_sample(image, self.grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    def spread(self, values: Tensor) -> Tensor:
        transposed = torch.func.vjp(self.read, torch.zeros_like(values))[1]
        spread: Tensor = transposed(values)[0]
        return spread


def _points(matrix: Tensor, roll: Tensor, size: Size, device: torch.device) -> Tensor:
    """Return where each output pixel is read, in pixels: [n,H,W,2] as (x, y)."""
    (height, width), dtype = size, precise_dtype(device)
    dy, dx = roll.to(device, non_blocking=True)[:, :, None].unbind(1)  # [n,1] each
    y = (torch.arange(height, device=device) - dy).remainder(height).to(dtype)[:, :, None]  # [n,H,1]
    x = (torch.arange(width, device=device) - dx).remainder(width).to(dtype)[:, None, :]  # [n,1,W]
    m = matrix[:, :2].to(device, dtype, non_blocking=True)[..., None, None]  # [n,2,3,1,1]
    return torch.stack([m[:, k, 0] * x + m[:, k, 1] * y + m[:, k, 2] for k in (0, 1)], dim=-1)  # [n,H,W,2]


def is_identity(matrix: Tensor) -> bool:
    """Return whether all matrices, on the CPU, are the identity, so that every point is a pixel of the image."""
    return torch.equal(matrix, torch.eye(3, dtype=matrix.dtype, device="cpu").expand_as(matrix))
