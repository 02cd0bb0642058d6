"""Consistency under a small movement, and similarity after randomised weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from dave_vit.errors import InputError
from dave_vit.metrics import consistency
from dave_vit.metrics.stability import cascade, similarity, small_warp, warp_images
from dave_vit.neighborhood import Warp

DRAW = torch.Generator().manual_seed(0)


def smooth_maps(count: int, side: int) -> torch.Tensor:
    """Positive maps without edges, so that resampling hardly changes them."""
    at = torch.linspace(-1, 1, side)
    centres = torch.rand(count, 2, generator=torch.Generator().manual_seed(1)) - 0.5
    squares = (at[None, :, None] - centres[:, 0, None, None]) ** 2 + (at[None, None] - centres[:, 1, None, None]) ** 2
    return torch.exp(-squares / 0.1)


def test_the_movement_is_that_of_the_paper():
    corner = torch.tensor([111.5, 111.5, 1.0], dtype=torch.float64)  # the centre only shifts
    moved = small_warp((224, 224)).matrix[0] @ corner
    assert (moved - corner).tolist() == pytest.approx([20, 8, 0])
    matrix = small_warp((224, 224)).matrix[0]
    assert math.degrees(math.atan2(matrix[1, 0], matrix[0, 0])) == pytest.approx(5)
    half = small_warp((112, 448))
    centre = torch.tensor([223.5, 55.5, 1.0], dtype=torch.float64)
    assert (half.matrix[0] @ centre - centre).tolist() == pytest.approx([40, 4, 0])


def test_a_map_that_moves_with_the_image_is_consistent():
    maps = smooth_maps(3, 64)
    warp = small_warp((64, 64))
    shown = warp_images(maps[:, None], warp)[:, 0]
    assert torch.equal(shown[1], warp.apply(maps[1:2, None])[0, 0])
    assert (consistency(maps, shown, warp) > 0.999).all()
    assert (consistency(maps, maps, warp) < 0.95).all()  # one that stays where it was is not


def test_consistency_by_hand():
    """A shift by one pixel to the right: the last column leaves, and the first of the moved map is not compared."""
    warp = Warp(torch.tensor([[[1.0, 0, 1], [0, 1, 0], [0, 0, 1]]]), torch.zeros(1, 2, dtype=torch.int64))
    maps = torch.tensor([[[1.0, 2.0, 9.0], [3.0, 5.0, 9.0]]])
    others = torch.tensor([[[7.0, 1.0, 4.0], [7.0, -2.0, 5.0]]])  # back: 1 4 / 0 5, beside 1 2 / 3 5
    expected = np.corrcoef([1, 2, 3, 5], [1, 4, 0, 5])[0, 1]
    assert consistency(maps, others, warp).item() == pytest.approx(expected)


def test_what_has_no_correlation_is_nan_and_leaves_the_others_alone():
    maps = smooth_maps(6, 32)
    warp = small_warp((32, 32))
    others = maps.clone()
    maps[0] = 0
    maps[1] = 0.3  # constant, and not exactly so after sums
    maps[2] = -1
    others[3, 5, 5] = torch.nan
    maps[4, 5, 5] = torch.inf
    values = consistency(maps, others, warp)
    assert values.isnan().tolist() == [True] * 5 + [False]
    assert similarity(maps, others).isnan().tolist() == [True] * 5 + [False]


def test_similarity_equals_scipy_with_ties():
    stats = pytest.importorskip("scipy.stats")
    first = torch.randn(3, 8, 9, generator=DRAW).mul(2).round()
    second = torch.randn(3, 8, 9, generator=DRAW)
    pairs = zip(first.numpy().clip(0), second.numpy().clip(0), strict=True)
    expected = [stats.spearmanr(a.ravel(), b.ravel()).statistic for a, b in pairs]
    np.testing.assert_allclose(similarity(first, second).numpy(), expected, atol=1e-12)


def test_the_cascade_goes_from_the_output_down_and_keeps_the_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    for parameter in model.parameters():  # a norm as it starts, all ones, has nothing to randomise
        nn.init.normal_(parameter)
    before = [p.clone() for p in model.parameters()]
    changed = []
    for stage in cascade(model, stages=2, seed=5):
        changed.append([bool((a != b).any()) for a, b in zip(stage.parameters(), before, strict=True)])
    assert changed[0] == [False] * 4 + [True] * 4
    assert changed[1][:4] == [True] * 4
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_the_cascade_keeps_scales_and_follows_its_seed():
    model = nn.Linear(200, 300)
    nn.init.normal_(model.weight, 0.5, 0.1)
    (one,) = cascade(model, 1, seed=1)
    (same,) = cascade(model, 1, seed=1)
    (other,) = cascade(model, 1, seed=2)
    assert torch.equal(one.weight, same.weight)
    assert not torch.equal(one.weight, other.weight)
    assert one.weight.mean().item() == pytest.approx(0.5, abs=0.01)
    assert one.weight.std().item() == pytest.approx(0.1, rel=0.02)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="expected the same"):
        consistency(torch.ones(1, 4, 4), torch.ones(1, 4, 5), small_warp((4, 4)))
