"""Backgrounds for training, whole batches at a time: the kinds of the benchmark, with odd structural parameters.

The benchmark's parameters are even (see ``dave_vit.data.builtin.backgrounds``), so none of its backgrounds occurs here.
"""

from __future__ import annotations

import math

import torch
from art import Bank
from torch import Tensor

SIZE = 224
_TURN = 1024


def _odd(low: int, high: int, count: int, device: torch.device) -> Tensor:
    """Odd integers between two odd bounds, both included."""
    return 2 * torch.randint(low // 2, high // 2 + 1, (count,), device=device) + 1


def _colours(count: int, device: torch.device) -> Tensor:
    return torch.rand(count, 3, 1, 1, device=device)


def _blend(weight: Tensor) -> Tensor:
    """From one random colour to another where ``weight`` [n, 1, H, W] goes from 0 to 1."""
    first, second = _colours(len(weight), weight.device), _colours(len(weight), weight.device)
    return first + (second - first) * weight


def _along(count: int, device: torch.device) -> Tensor:
    """Distance of each pixel from the centre in a random direction, [n, 1, H, W], in pixels."""
    angle = _odd(1, _TURN - 1, count, device) * (2 * math.pi / _TURN)
    ruler = torch.arange(SIZE, device=device) - (SIZE - 1) / 2
    x, y = ruler[None, None, :], ruler[None, :, None]
    return (x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None])[:, None]


def gradient(count: int, bank: Bank) -> Tensor:
    """Linear gradients."""
    return _blend(_along(count, bank.art.device) / (1.5 * SIZE) + 0.5)


def radial(count: int, bank: Bank) -> Tensor:
    """Gradients with the square of the distance from a point."""
    device = bank.art.device
    ruler = torch.arange(SIZE, device=device)
    x = (ruler - _odd(1, SIZE - 1, count, device)[:, None])[:, None, None, :]
    y = (ruler - _odd(1, SIZE - 1, count, device)[:, None])[:, None, :, None]
    return _blend(((x * x + y * y) / SIZE**2).clamp(max=1))


def _octaves(count: int, channels: int, device: torch.device) -> Tensor:
    """Value noise of four octaves, [n, C, H, W]."""
    cells = int(_odd(1, 7, 1, device))
    total = torch.zeros(count, channels, SIZE, SIZE, device=device)
    for octave in range(4):
        lattice = torch.rand(count, channels, (cells << octave) + 1, (cells << octave) + 1, device=device)
        place = torch.arange(SIZE, device=device) * (cells << octave) / SIZE
        cell, t = place.long(), place.frac()
        t = t * t * (3 - 2 * t)
        weights = torch.zeros(SIZE, (cells << octave) + 1, device=device)
        weights.scatter_(1, cell[:, None], 1 - t[:, None]).scatter_(1, cell[:, None] + 1, t[:, None])
        total += weights @ lattice @ weights.T * 2 ** (3 - octave)
    return ((total - 7.5) / 9 + 0.5).clamp(0, 1)


def clouds(count: int, bank: Bank) -> Tensor:
    """Value noise between two colours."""
    return _blend(_octaves(count, 1, bank.art.device))


def confetti(count: int, bank: Bank) -> Tensor:
    """Value noise in each colour channel on its own."""
    return _octaves(count, 3, bank.art.device)


def stripes(count: int, bank: Bank) -> Tensor:
    """Stripes, hard or soft."""
    device = bank.art.device
    period = _odd(SIZE // 14 + 1, SIZE // 4 - 1, count, device)[:, None, None, None]
    wave = 1 - (2 * ((_along(count, device) + 4 * SIZE) / period).frac() - 1).abs()
    hard = torch.rand(count, 1, 1, 1, device=device) < 0.5
    return _blend(torch.where(hard, (wave >= 0.5).float(), wave))


def voronoi(count: int, bank: Bank) -> Tensor:
    """Cells around random points, darker away from them."""
    device = bank.art.device
    points = int(_odd(7, 15, 1, device))
    ruler = torch.arange(SIZE, device=device)
    x = (ruler - torch.randint(SIZE, (count, points, 1), device=device)) ** 2
    y = (ruler - torch.randint(SIZE, (count, points, 1), device=device)) ** 2
    squares, nearest = (x[:, :, None, :] + y[:, :, :, None]).min(dim=1)  # [n, H, W]
    colours = torch.rand(count, 3, points, device=device)
    painted = colours.gather(2, nearest.flatten(1)[:, None].expand(-1, 3, -1)).unflatten(2, (SIZE, SIZE))
    return painted * (1 - (squares * (1200 / 255 / SIZE**2)).clamp(max=110 / 255))[:, None]


def shapes(count: int, bank: Bank) -> Tensor:
    """Turned rectangles and ellipses over a gradient."""
    canvas, device = gradient(count, bank), bank.art.device
    ruler = torch.arange(SIZE, device=device)
    for _ in range(int(_odd(5, 11, 1, device))):
        x = (ruler - torch.randint(SIZE, (count, 1), device=device))[:, None, None, :]
        y = (ruler - torch.randint(SIZE, (count, 1), device=device))[:, None, :, None]
        angle = (_odd(1, _TURN - 1, count, device) * (2 * math.pi / _TURN))[:, None, None, None]
        a, b = torch.randint(SIZE // 28, SIZE // 7 + 1, (2, count, 1, 1, 1), device=device)
        u = (x * angle.cos() + y * angle.sin()).abs() / a
        v = (y * angle.cos() - x * angle.sin()).abs() / b
        ellipse = torch.rand(count, 1, 1, 1, device=device) < 0.5
        inside = torch.where(ellipse, u * u + v * v, torch.maximum(u, v)) <= 1
        canvas = torch.where(inside, _colours(count, device), canvas)
    return canvas


def texture(count: int, bank: Bank) -> Tensor:
    """Pieces of photographed surfaces in two colours."""
    device = bank.art.device
    kinds, height, width = bank.textures.shape
    offsets = torch.arange(SIZE, device=device)
    rows = offsets + torch.randint(height - SIZE + 1, (count, 1), device=device)
    columns = offsets + torch.randint(width - SIZE + 1, (count, 1), device=device)
    rows = torch.where(torch.rand(count, 1, device=device) < 0.5, rows, rows.flip(1))
    columns = torch.where(torch.rand(count, 1, device=device) < 0.5, columns, columns.flip(1))
    which = torch.randint(kinds, (count, 1, 1), device=device)
    return _blend(bank.textures[which, rows[:, :, None], columns[:, None, :]][:, None].float())


PAINTERS = (gradient, radial, clouds, confetti, stripes, voronoi, shapes, texture)


def paint(count: int, bank: Bank) -> Tensor:
    """Backgrounds of all kinds in equal shares, [n, 3, H, W] in 0..1; ``count`` is a multiple of their number."""
    return torch.cat([painter(count // len(PAINTERS), bank) for painter in PAINTERS])
