"""Pools of composed training pictures in three difficulties, made and kept on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from art import SIDE, Bank
from backdrops import SIZE, paint
from torch import Tensor

_TILT = math.radians(25)
_VISIBLE = 0.6


@dataclass(frozen=True)
class Difficulty:
    """What a pool's pictures hold: (least, most) object size in pixels and distractors, and the share of pairs."""

    sizes: tuple[int, int]
    distractors: tuple[int, int]
    pairs: float = 0.0


# Large and alone; one or two distractors; the benchmark's own clutter.
DIFFICULTIES = (Difficulty((90, 160), (0, 0)), Difficulty((72, 128), (1, 2)), Difficulty((60, 116), (2, 4), pairs=0.15))


def _cast(count: int, difficulty: Difficulty, bank: Bank) -> tuple[Tensor, Tensor]:
    """Sprite numbers [n, slots] (-1: empty), targets first, and labels [n, 2], equal where there is one target."""
    device = bank.art.device
    classes, table = bank.targets.shape
    first = torch.randint(classes, (count, 1), device=device)
    second = (first + torch.randint(1, classes, (count, 1), device=device)) % classes
    paired = torch.rand(count, 1, device=device) < difficulty.pairs
    labels = torch.cat([first, torch.where(paired, second, first)], dim=1)
    draw = torch.randint(table, (count, 2), device=device)
    targets = bank.targets[labels, draw]
    targets[:, 1:].masked_fill_(~paired, -1)
    least, most = difficulty.distractors
    if most == 0:
        return targets, labels
    kinds = torch.rand(count, len(bank.distractors), device=device).argsort(dim=1)[:, :most]
    others = bank.distractors[kinds, torch.randint(table, kinds.shape, device=device)]
    number = torch.randint(least, most + 1, (count, 1), device=device) - 2 * paired.long()
    others.masked_fill_(torch.arange(most, device=device) >= number.clamp(min=1), -1)
    return torch.cat([targets, others], dim=1), labels


def _tints(count: int, device: torch.device) -> Tensor:
    """Colour matrices [n, 3, 3]: a turn about the grey axis, saturation, brightness; luminance kept."""
    luma = torch.tensor([0.211, 0.715, 0.074], device=device)
    hue = (torch.rand(count, 1, 1, device=device) * 2 - 1) * (50 / 1024 * 2 * math.pi)
    saturation = 0.7 + 0.55 * torch.rand(count, 1, 1, device=device)
    brightness = 0.84 + 0.25 * torch.rand(count, 1, 1, device=device)
    chroma = torch.eye(3, device=device) - luma
    cross = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], device=device) / math.sqrt(3)
    twist = cross @ chroma
    twist = twist - luma @ twist
    return (luma.expand(3, 3) + saturation * (hue.cos() * chroma + hue.sin() * twist)) * brightness


def _grids(step: Tensor, centre: Tensor, angle: Tensor, flip: Tensor, dtype: torch.dtype) -> Tensor:
    """Where each picture's pixels fall in the sprite's cell, [n, H, W, 2] for grid_sample."""
    scale = step * (SIZE / SIDE)
    c, s = angle.cos() * scale, angle.sin() * scale
    x, y = centre.unbind(1)
    across = torch.stack([c, s, -(c * x + s * y)], dim=1) * flip[:, None]
    down = torch.stack([-s, c, s * x - c * y], dim=1)
    theta = torch.stack([across, down], dim=1)  # [n, 2, 3]
    return F.affine_grid(theta, [len(step), 1, SIZE, SIZE], align_corners=False).to(dtype)


def _layer(sprites: Tensor, sizes: tuple[int, int], bank: Bank) -> tuple[Tensor, Tensor, Tensor]:
    """One object per picture: colours and alpha [n, 4, H, W], shadow [n, 1, H, W], silhouette's full area [n]."""
    count, device, dtype = len(sprites), bank.art.device, bank.art.dtype
    size = sizes[0] + (sizes[1] - sizes[0]) * torch.rand(count, device=device)
    step = bank.length[sprites] / size
    angle = (torch.rand(count, device=device) * 2 - 1) * _TILT
    centre = (torch.rand(count, 2, device=device) * 2 - 1) * 0.8  # of half the picture
    flip = torch.randint(2, (count,), device=device) * 2.0 - 1
    cells = bank.art[(step >= 1.5).long(), sprites]
    rgba = F.grid_sample(cells, _grids(step, centre, angle, flip, dtype), align_corners=False)
    colours = torch.bmm(_tints(count, device).to(dtype), rgba[:, :3].flatten(2)).unflatten(2, (SIZE, SIZE))
    rgba = torch.cat([colours.clamp(min=0).minimum(rgba[:, 3:]), rgba[:, 3:]], dim=1)
    drop = torch.rand(count, 2, device=device) * torch.tensor([10.0, 5.0], device=device)
    drop = (drop + torch.tensor([-5.0, 1.0], device=device)) * (2 / SIZE)
    shadow = F.grid_sample(bank.shadow[sprites], _grids(step, centre + drop, angle, flip, dtype), align_corners=False)
    return rgba, shadow, bank.area[sprites] / step**2


def compose(count: int, difficulty: Difficulty, bank: Bank) -> tuple[Tensor, Tensor]:
    """Pictures [m, 3, H, W] uint8 and labels [m, 2]; those whose targets are hidden are left out, so m <= count."""
    device, dtype = bank.art.device, bank.art.dtype
    canvas = paint(count, bank).to(dtype)
    sprites, labels = _cast(count, difficulty, bank)
    order = torch.rand(sprites.shape, device=device).argsort(dim=1)
    visible = torch.zeros(count, 2, SIZE, SIZE, device=device, dtype=torch.bool)
    area = torch.zeros(count, 2, device=device)
    for slot in order.unbind(1):
        chosen = sprites.gather(1, slot[:, None])[:, 0]
        present = (chosen >= 0).to(dtype)[:, None, None, None]
        rgba, shadow, full = _layer(chosen.clamp(min=0), difficulty.sizes, bank)
        strength = (0.2 + 0.4 * torch.rand(count, 1, 1, 1, device=device)).to(dtype) * present
        rgba *= present
        canvas = rgba[:, :3] + canvas * (1 - shadow * strength) * (1 - rgba[:, 3:])
        solid = rgba[:, 3] >= 0.5
        for target in (0, 1):
            is_target = slot == target
            visible[:, target] = torch.where(is_target[:, None, None], solid, visible[:, target] & ~solid)
            area[:, target] = torch.where(is_target, full * present.flatten(), area[:, target])
    shown = visible.flatten(2).sum(2) >= _VISIBLE * area
    return _grained(canvas)[shown.all(1)], labels[shown.all(1)]


def _grained(canvas: Tensor) -> Tensor:
    """Noise of a random strength, then bytes."""
    level = torch.rand(len(canvas), 1, 1, 1, device=canvas.device, dtype=canvas.dtype) * (24 / 255)
    noise = torch.rand_like(canvas) + torch.rand_like(canvas) - 1
    return (canvas + noise * level).clamp(0, 1).mul(255).round().to(torch.uint8)


class Pool:
    """Pictures of one difficulty, replaced little by little.

    Args:
        size: how many pictures it keeps.
        chunk: how many are composed at once.
    """

    def __init__(self, size: int, difficulty: Difficulty, bank: Bank, chunk: int) -> None:
        self.difficulty, self.bank, self.chunk = difficulty, bank, chunk
        device = bank.art.device
        self.images = torch.empty(size, 3, SIZE, SIZE, dtype=torch.uint8, device=device)
        self.labels = torch.empty(size, 2, dtype=torch.long, device=device)
        self.filled = self._next = 0
        while self.filled < size:
            self.refresh()

    def refresh(self) -> int:
        """Compose a chunk over the oldest pictures; returns how many came."""
        images, labels = compose(self.chunk, self.difficulty, self.bank)
        count = min(len(images), len(self.images) - self._next)
        place = slice(self._next, self._next + count)
        self.images[place], self.labels[place] = images[:count], labels[:count]
        self._next = (self._next + count) % len(self.images)
        self.filled = max(self.filled, place.stop)
        return count

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Random pictures with their labels."""
        index = torch.randint(self.filled, (count,), device=self.images.device)
        return self.images[index], self.labels[index]
