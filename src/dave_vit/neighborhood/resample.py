"""Reading an image at the points of an affine map, and the transpose of that reading.

Pixel centres are at integers, x to the right and y down; the image is zero outside of its pixels. Points that fall on
pixels are read by index, so flips, shifts and the identity are exact; all others are interpolated bilinearly. The
choice is made per sample from its own matrix: what a sample gives does not depend on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit.precision import precise_dtype, working_dtype

Size = tuple[int, int]  # (H, W)
Kernel = Callable[[Tensor, Tensor], Tensor]  # (image [n,C,H,W], points [n,H,W,2]) -> [n,C,H,W]


def read(image: Tensor, matrix: Tensor, roll: Tensor) -> Tensor:
    """The image at ``matrix @ ((p - roll) mod size)`` for every pixel p: [n,C,H,W] -> [n,C,H,W].

    Args:
        image: [n,C,H,W].
        matrix: [n,3,3] on the CPU; takes (x, y, 1).
        roll: [n,2] on the CPU; integers (dy, dx).
    """
    return _per_kind(image, matrix, roll, exact=_read_pixels, between=_read_between)


def read_transposed(values: Tensor, matrix: Tensor, roll: Tensor) -> Tensor:
    """The transpose of :func:`read` as a linear map: every value is added where it was read from."""
    return _per_kind(values, matrix, roll, exact=_spread_pixels, between=_spread_between)


def _per_kind(image: Tensor, matrix: Tensor, roll: Tensor, *, exact: Kernel, between: Kernel) -> Tensor:
    """Runs each sample through the kernel that its matrix needs, in float32 or better."""
    on_pixels = (matrix == matrix.round()).all(dim=(1, 2))  # [n], known on the host: nothing waits for the device
    wide = image.to(working_dtype(image.dtype))
    with torch.autocast(image.device.type, enabled=False):
        if on_pixels.all():
            out = exact(wide, _points(wide, matrix, roll))
        elif not on_pixels.any():
            out = between(wide, _points(wide, matrix, roll))
        else:
            out = torch.empty_like(wide, memory_format=torch.contiguous_format)
            for kernel, chosen in ((exact, on_pixels), (between, ~on_pixels)):
                rows = chosen.nonzero().squeeze(1)
                there = rows.to(wide.device, non_blocking=True)
                part = wide[there]
                out[there] = kernel(part, _points(part, matrix[rows], roll[rows]))
    return out.to(image.dtype)


def _points(image: Tensor, matrix: Tensor, roll: Tensor) -> Tensor:
    """Where each output pixel is read, in pixels: [n,H,W,2] as (x, y)."""
    height, width = image.shape[-2:]
    device, dtype = image.device, precise_dtype(image.device)
    dy, dx = roll.to(device, non_blocking=True)[:, :, None].unbind(1)  # [n,1] each
    y = (torch.arange(height, device=device) - dy).remainder(height).to(dtype)[:, :, None]  # [n,H,1]
    x = (torch.arange(width, device=device) - dx).remainder(width).to(dtype)[:, None, :]  # [n,1,W]
    m = matrix[:, :2].to(device, dtype, non_blocking=True)[..., None, None]  # [n,2,3,1,1]
    return torch.stack([m[:, k, 0] * x + m[:, k, 1] * y + m[:, k, 2] for k in (0, 1)], dim=-1)  # [n,H,W,2]


def _pixel_index(points: Tensor) -> tuple[Tensor, Tensor]:
    """Row-major index of each point and whether it is inside: [n,1,H*W] each; indices outside are 0."""
    height, width = points.shape[1:3]
    x, y = points.to(torch.int64).flatten(1, 2).unsqueeze(1).unbind(-1)  # [n,1,H*W] each
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return torch.where(inside, y * width + x, 0), inside


def _read_pixels(image: Tensor, points: Tensor) -> Tensor:
    index, inside = _pixel_index(points)
    flat = image.flatten(2)  # [n,C,H*W]
    return torch.where(inside, flat.gather(2, index.expand_as(flat)), 0).view(image.shape)


def _spread_pixels(values: Tensor, points: Tensor) -> Tensor:
    index, inside = _pixel_index(points)
    flat = torch.where(inside, values.flatten(2), 0)  # [n,C,H*W]
    return torch.zeros_like(flat).scatter_add(2, index.expand_as(flat), flat).view(values.shape)


def _read_between(image: Tensor, points: Tensor) -> Tensor:
    x, y = points.unbind(-1)  # [n,H,W] each
    # grid_sample takes pixel k of n at (2k + 1) / n - 1, which also holds for images one pixel wide.
    grid = torch.stack([(2 * x + 1) / image.shape[3] - 1, (2 * y + 1) / image.shape[2] - 1], dim=-1).to(image.dtype)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _spread_between(values: Tensor, points: Tensor) -> Tensor:
    transposed = torch.func.vjp(lambda image: _read_between(image, points), torch.zeros_like(values))[1]
    spread: Tensor = transposed(values)[0]
    return spread
