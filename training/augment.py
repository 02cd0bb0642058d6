"""What happens to a batch on its way into the model: crop, zoom, turn, flip, light, grids of four, noise."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_MOVED = 0.65  # share of pictures that are zoomed, turned and shifted; the others stay sharp
_ZOOM = (0.5, 1.2)
_TURN = math.radians(15)
_SHIFT = 0.16  # of half the picture
_NOISY, _NOISE = 0.5, 0.3  # share of noisy pictures and the greatest standard deviation, of the range 0..1
_GRIDS = 1 / 16  # share of pictures that become four in one, with the labels shared: GridPG asks for such pictures


def _moved(images: Tensor) -> Tensor:
    """Flipped, and most of them zoomed, turned and shifted; mirrored beyond the edges."""
    count, device = len(images), images.device
    moved = (torch.rand(count, device=device) < _MOVED).float()
    low, high = math.log(_ZOOM[0]), math.log(_ZOOM[1])
    scale = torch.exp(-moved * (low + (high - low) * torch.rand(count, device=device)))
    angle = moved * _TURN * (2 * torch.rand(count, device=device) - 1)
    shift = moved[:, None] * _SHIFT * (2 * torch.rand(count, 2, device=device) - 1)
    flip = torch.randint(2, (count,), device=device) * 2.0 - 1
    c, s = angle.cos() * scale, angle.sin() * scale
    across = torch.stack([c * flip, s * flip, shift[:, 0]], dim=1)
    down = torch.stack([-s, c, shift[:, 1]], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid.to(images.dtype), padding_mode="reflection", align_corners=False)


def _lit(images: Tensor) -> Tensor:
    """Another brightness, contrast and colour of the light."""
    shape, device, dtype = (len(images), 1, 1, 1), images.device, images.dtype
    contrast = 0.65 + 0.5 * torch.rand(shape, device=device, dtype=dtype)
    light = 0.2 * torch.rand(shape, device=device, dtype=dtype) - 0.1
    gain = 1 + 0.2 * torch.rand(len(images), 3, 1, 1, device=device, dtype=dtype) - 0.1
    return ((images - 0.5) * contrast * gain + 0.5 + light).clamp(0, 1)


def _gridded(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The first few pictures replaced by grids of four; labels [n, C] are averaged."""
    count = int(len(images) * _GRIDS)
    chosen = torch.randint(len(images), (4, count), device=images.device)
    a, b, c, d = (F.avg_pool2d(images[index], 2) for index in chosen)
    grids = torch.cat([torch.cat([a, b], dim=3), torch.cat([c, d], dim=3)], dim=2)
    return torch.cat([grids, images[count:]]), torch.cat([labels[chosen].mean(0), labels[count:]])


def augment(images: Tensor, labels: Tensor, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bytes [n, 3, H, W] and labels [n, 2] to inputs in about 0..1 and label distributions [n, classes]."""
    shares = torch.zeros(len(labels), classes, device=labels.device)
    shares.scatter_add_(1, labels, torch.full(labels.shape, 0.5, device=labels.device))
    inputs, shares = _gridded(_lit(_moved(images.to(dtype) / 255)), shares)
    noisy = torch.rand(len(images), 1, 1, 1, device=images.device) < _NOISY
    level = noisy * _NOISE * torch.rand(len(images), 1, 1, 1, device=images.device)
    return inputs + level.to(dtype) * torch.randn_like(inputs), shares
