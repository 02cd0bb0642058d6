"""A batch of affine warps, each followed by a wrapped shift, resampled once, and the transpose of that.

Pixel centres are at integers, x to the right and y down; the image is zero outside of its pixels. Points that fall on
pixels are read by index, so flips, shifts and the identity are exact; all others are interpolated bilinearly. The
choice is made per sample from its own matrix: what a sample gives does not depend on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import precise_dtype, working_dtype
from dave_vit.errors import InputError, OptionError

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
        with torch.inference_mode(mode=False), torch.enable_grad():  # without, older versions of torch return zeros
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


@dataclass(frozen=True, eq=False)
class Warp:
    """One warp per sample, held on the host so that choosing how to resample never waits for the device.

    ``apply`` gives out(p) = x(matrix^-1 q) with q = (p - roll) mod size, bilinearly, zero outside. The inverse and the
    adjoint differ: the inverse moves values back to where they were read, the adjoint also keeps their total weight,
    so that their amplitudes differ by the square of the scale.

    Args:
        matrix: [n,3,3], source pixel (x, y, 1) to output pixel, pixel centres at integers.
        roll: [n,2], integer shift (dy, dx) that wraps around, after the matrix.
    """

    matrix: Tensor
    roll: Tensor
    _of: tuple[Warp, tuple[int, int]] | None = field(default=None, repr=False)  # more warps, and which these are
    _resamplers: dict[tuple[Any, ...], Resampler] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        n = len(self.matrix)
        if self.matrix.shape != (n, 3, 3) or self.roll.shape != (n, 2):
            shapes = f"{list(self.matrix.shape)} and {list(self.roll.shape)}"
            raise OptionError(f"warp of matrix and roll shaped {shapes}; expected [n,3,3] and [n,2]")
        if self.roll.is_floating_point() or self.roll.is_complex():
            raise OptionError(f"roll is {self.roll.dtype}; expected whole pixels, so give an integer tensor")
        object.__setattr__(self, "matrix", self.matrix.detach().to("cpu", torch.float64))
        object.__setattr__(self, "roll", self.roll.detach().to("cpu", torch.int64))
        affine = (self.matrix[:, 2] == self.matrix.new_tensor([0.0, 0.0, 1.0])).all()
        area = self.matrix[:, 0, 0] * self.matrix[:, 1, 1] - self.matrix[:, 0, 1] * self.matrix[:, 1, 0]
        if not (affine and self.matrix.isfinite().all() and (area != 0).all()):
            how = "expected finite rows [a b x] [c d y] [0 0 1] with ad != bc"
            raise OptionError(f"warp matrix cannot be inverted; {how}")

    def __len__(self) -> int:
        return len(self.matrix)

    def part(self, start: int, stop: int) -> Warp:
        """Select the warps ``start`` to ``stop``; they share the resamplers of all warps."""
        return Warp(self.matrix[start:stop], self.roll[start:stop], (self, (start, stop)))

    def apply(self, x: Tensor, *, fill: float = 0.0) -> Tensor:
        """Warp images: [n,C,H,W] -> [n,C,H,W]; the very same tensor where every warp is the identity.

        Args:
            x: images.
            fill: what comes in from outside of the picture.
        """
        self._check(x)
        if self._is_still:
            return x
        resampler = self._resampler("there", x)
        return resampler.read(x - fill) + fill if fill else resampler.read(x)

    def inverse(self, y: Tensor) -> Tensor:
        """Undo the shift exactly, then resample with the forward matrix: out(p) = y_unrolled(matrix p)."""
        self._check(y)
        if self.roll.any():
            y = self._resampler("unroll", y).read(y)
        return y if is_identity(self.matrix) else self._resampler("back", y).read(y)

    def adjoint(self, y: Tensor) -> Tensor:
        """Apply the transpose of ``apply`` as a linear map: [n,C,H,W] -> [n,C,H,W].

        That is, <apply(x), y> = <x, adjoint(y)> for all x and y. On CUDA its sums run in no fixed order, so that
        repeated calls may differ in the last bit.
        """
        self._check(y)
        return y if self._is_still else self._resampler("there", y).spread(y)

    @property
    def _is_still(self) -> bool:
        return is_identity(self.matrix) and not bool(self.roll.any())

    def _resampler(self, way: str, x: Tensor) -> Resampler:
        """Return the resampler for images of this form; cached, since the same warps serve batch after batch."""
        key = (way, x.shape[2:], x.dtype, x.device)
        if key not in self._resamplers:
            if self._of is not None:
                self._resamplers[key] = self._of[0]._resampler(way, x).part(*self._of[1])
            else:
                matrix, roll = {
                    "there": (invert_affine(self.matrix), self.roll),
                    "unroll": (_identity(len(self)), -self.roll),
                    "back": (self.matrix, torch.zeros_like(self.roll)),
                }[way]
                size = (x.shape[2], x.shape[3])
                self._resamplers[key] = Resampler(matrix, roll, size=size, dtype=x.dtype, device=x.device)
        return self._resamplers[key]

    def _check(self, x: Tensor) -> None:
        if x.ndim != 4 or len(x) != len(self) or not x.is_floating_point():
            raise InputError(
                f"cannot warp {x.dtype} of shape {list(x.shape)}; expected floats shaped [{len(self)},C,H,W], one "
                "image per warp"
            )


def affine_matrix(size: Size, *, flip: Tensor, rotation: Tensor, scale: Tensor, translation: Tensor) -> Tensor:
    """Return matrices that flip left-right, rotate and scale about the centre, then translate: [n,3,3] in float64.

    Args:
        size: (H, W).
        flip: [n], true where the image is mirrored (first of all).
        rotation: [n], degrees; positive turns from x (right) towards y (down).
        scale: [n], above 1 enlarges.
        translation: [n,2], pixels (x, y).
    """
    centre = (torch.tensor([size[1], size[0]], dtype=torch.float64, device="cpu") - 1) / 2  # (x, y)
    angle = torch.deg2rad(rotation.double())
    mirror = torch.where(flip.bool(), -1.0, 1.0).double()
    cos, sin = scale * torch.cos(angle), scale * torch.sin(angle)
    matrix = _identity(len(flip))
    matrix[:, 0, 0], matrix[:, 0, 1] = mirror * cos, -sin
    matrix[:, 1, 0], matrix[:, 1, 1] = mirror * sin, cos
    matrix[:, :2, 2] = centre - matrix[:, :2, :2] @ centre + translation
    return matrix


def invert_affine(matrix: Tensor) -> Tensor:
    """Invert [n,3,3] affine matrices in closed form: exact for flips and whole-pixel shifts, unlike an LU solve."""
    a, b, c, d = matrix[:, :2, :2].flatten(1).unbind(1)
    linear = torch.stack([d, -b, -c, a], dim=1).view(-1, 2, 2) / (a * d - b * c)[:, None, None]
    out = _identity(len(matrix))
    out[:, :2, :2] = linear
    out[:, :2, 2] = -(linear @ matrix[:, :2, 2:]).squeeze(2)
    return out


def _identity(n: int) -> Tensor:
    return torch.eye(3, dtype=torch.float64, device="cpu").repeat(n, 1, 1)
