"""Iterated integrated attributions against their definition, in plain loops on a small model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import tiny_models
from dave_vit import create_method
from dave_vit.errors import DaveError, OptionError

HEADS, WIDTH = 2, 8


class Block(nn.Module):
    """Attention written out; ``scale`` and ``seen`` are what the loops below need."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0, seen: list[Tensor] | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, N, d]
        matrix = (q @ k.transpose(-2, -1)).softmax(-1)
        if scale != 1.0:
            matrix = matrix * scale
        if seen is not None:
            matrix.retain_grad()
            seen.append(matrix)
        return x + self.out((matrix @ v).transpose(1, 2).flatten(2)).tanh()


class Small(nn.Module):
    def __init__(self, *, average: bool = False) -> None:
        super().__init__()
        self.average = average
        self.embed, self.head = nn.Conv2d(3, WIDTH, 8, stride=8), nn.Linear(WIDTH, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, scales: tuple[float, ...] = (), seen: list[Tensor] | None = None) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        if not self.average:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        factors = (1.0,) * (3 - len(scales)) + scales
        for block, factor in zip(self.blocks, factors, strict=True):
            x = block(x, factor, seen)
        return self.head(x.mean(1) if self.average else x[:, 0])


def by_loops(model: Small, x: Tensor, target: int, steps: int, layers: int) -> Tensor:
    """The map of one image on the grid of patches."""
    axis = [i / steps for i in range(1, steps + 1)]
    points = list(itertools.product(axis, repeat=1 + layers))
    sums = [0.0, 0.0, 0.0]
    for first, *rest in points:
        seen: list[Tensor] = []
        model(first * x, tuple(rest), seen)[0, target].backward()
        for block, matrix in enumerate(seen):
            sums[block] = sums[block] + (matrix * matrix.grad).clamp(min=0)[0].mean(0).detach()
    joint = torch.eye(len(sums[0]), dtype=x.dtype)
    for total in sums:
        mixed = total / len(points) + torch.eye(len(total), dtype=x.dtype)
        joint = mixed / mixed.sum(-1, keepdim=True) @ joint
    tokens = joint.mean(0) if model.average else joint[0, 1:]
    return tokens.reshape(2, 2)


@pytest.mark.parametrize("average", [False, True], ids=["class token", "mean of tokens"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_definition(layers, average):
    torch.manual_seed(0)
    model = tiny_models.drawn(Small(average=average).double(), std=0.5)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    method = create_method("iia", model, steps=3, layers=layers, resolution="patch", chunk=4)
    found = method.attribute(x, [[1, 3], [2, 2]])
    assert found.shape == (2, 2, 1, 2, 2)
    for image, column, target in ((0, 0, 1), (0, 1, 3), (1, 0, 2)):
        expected = by_loops(model, x[image : image + 1], target, 3, layers)
        torch.testing.assert_close(found[image, column, 0], expected)


def test_the_map_is_the_grid_brought_to_the_images_size():
    model, x = tiny_models.vit(), tiny_models.images(1)
    grid = create_method("iia", model, steps=2, resolution="patch").attribute(x, 1)
    wide = create_method("iia", model, steps=2).attribute(x, 1)
    expected = nn.functional.interpolate(grid, x.shape[-2:], mode="bilinear")[:, 0]
    torch.testing.assert_close(wide.sum(1), expected)


def test_fused_attention_is_seen():
    model, x = tiny_models.vit(), tiny_models.images(1)
    fused = create_method("iia", model, steps=2).attribute(x, 1)
    for block in model.blocks:
        block.attn.fused_attn = not block.attn.fused_attn
    torch.testing.assert_close(create_method("iia", model, steps=2).attribute(x, 1), fused, rtol=1e-4, atol=1e-7)


def test_refusals():
    model, x = tiny_models.vit(), tiny_models.images(1)
    with pytest.raises(OptionError, match="2 blocks"):
        create_method("iia", model, layers=3).attribute(x, 0)
    with pytest.raises(OptionError, match="steps is 0"):
        create_method("iia", model, steps=0)
    with pytest.raises(DaveError, match="windows or stages"):
        create_method("iia", tiny_models.swin()).attribute(x, 0)
