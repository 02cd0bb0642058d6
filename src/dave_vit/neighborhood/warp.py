"""A batch of affine warps, each followed by a wrapped shift, resampled once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dave_vit.errors import InputError, OptionError
from dave_vit.neighborhood.resample import Resampler, Size, is_identity


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
        _check_invertible(self.matrix)

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
            self._resamplers[key] = (
                self._build_resampler(way, x) if self._of is None else self._of[0]._resampler(way, x).part(*self._of[1])
            )
        return self._resamplers[key]

    def _build_resampler(self, way: str, x: Tensor) -> Resampler:
        if way == "there":
            matrix, roll = invert_affine(self.matrix), self.roll
        elif way == "unroll":
            matrix, roll = _identity(len(self)), -self.roll
        else:
            matrix, roll = self.matrix, torch.zeros_like(self.roll)
        return Resampler(matrix, roll, size=(x.shape[2], x.shape[3]), dtype=x.dtype, device=x.device)

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


def _check_invertible(matrix: Tensor) -> None:
    affine = (matrix[:, 2] == matrix.new_tensor([0.0, 0.0, 1.0])).all()
    area = matrix[:, 0, 0] * matrix[:, 1, 1] - matrix[:, 0, 1] * matrix[:, 1, 0]
    if not (affine and matrix.isfinite().all() and (area != 0).all()):
        raise OptionError("warp matrix cannot be inverted; expected finite rows [a b x] [c d y] [0 0 1] with ad != bc")
