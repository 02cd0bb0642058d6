"""Which images enter grids, and how they are put together."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dave_vit.data.grids import GridCandidate, GridOptions, choose_grids, compose_grids, select_candidates
from dave_vit.errors import InputError, OptionError


def pool(per_class: dict[int, int]) -> list[GridCandidate]:
    rows = [(label, rank) for label, count in per_class.items() for rank in range(count)]
    return [GridCandidate(index, label, 0.99 - 0.001 * rank) for index, (label, rank) in enumerate(rows)]


def test_candidates_are_right_and_sure():
    logits = torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [1.0, 0, 0], [0, 9.0, 0]])
    candidates = select_candidates(logits, [0, 1, 0, None], start=10)
    assert [(one.index, one.label) for one in candidates] == [(10, 0)]
    assert [one.index for one in select_candidates(logits, [0, 1, 0, 1], confidence=0.5)] == [0, 2, 3]


def test_grids_have_distinct_classes_and_use_the_surest_first():
    grids = choose_grids(pool(dict.fromkeys(range(10), 4)), GridOptions(grids=10))
    for grid in grids:
        assert len(set(grid.labels)) == 4
        assert [index // 4 for index in grid.images] == list(grid.labels)
    uses = Counter(index for grid in grids for index in grid.images)
    assert set(uses.values()) == {1}  # 40 images, 40 cells
    first = choose_grids(pool(dict.fromkeys(range(10), 4)), GridOptions(grids=2))
    assert all(index % 4 == 0 for grid in first for index in grid.images)


def test_no_image_returns_while_unused_ones_remain():
    grids = choose_grids(pool({0: 5, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}), GridOptions(grids=20))
    seen: set[int] = set()
    for grid in grids:
        unused = set(range(10)) - seen
        classes = {0 if index < 5 else index - 4 for index in unused}
        fresh = [index for index in grid.images if index not in seen]
        assert len(fresh) == min(4, len(classes))
        seen.update(grid.images)


def test_the_seed_decides():
    images = pool(dict.fromkeys(range(30), 2))
    assert choose_grids(images) == choose_grids(list(reversed(images)))
    assert choose_grids(images) != choose_grids(images, GridOptions(seed=1))


def test_too_few_classes_give_no_grid():
    assert choose_grids(pool({0: 9, 1: 9, 2: 9})) == []
    assert choose_grids(pool(dict.fromkeys(range(8), 1)), GridOptions(cells=3)) == []


def test_resized_cells_lie_in_reading_order():
    images = torch.arange(4.0)[None, :, None, None, None].expand(1, 4, 3, 8, 8)
    grid = compose_grids(images)
    assert grid.shape == (1, 3, 8, 8)
    assert grid[0, 0, ::4, ::4].tolist() == [[0, 1], [2, 3]]


def test_resized_cells_equal_a_resize_of_each_image():
    functional = pytest.importorskip("torchvision.transforms.functional")
    images = torch.randn(2, 9, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    cell = functional.resize(images[:, 5], [6, 7], antialias=True)  # 20 is cut at 7 and 13
    torch.testing.assert_close(compose_grids(images)[:, :, 7:13, 13:20], cell)


def test_full_cells_keep_every_pixel():
    images = torch.randn(2, 4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    grid = compose_grids(images, "full")
    assert grid.shape == (2, 3, 10, 12)
    assert torch.equal(grid[:, :, 5:, :6], images[:, 2])
    assert torch.equal(grid[:, :, :5, 6:], images[:, 1])


def test_impossible_grids_are_refused():
    with pytest.raises(InputError):
        compose_grids(torch.ones(1, 3, 3, 8, 8))
    for options in ({"cells": 1}, {"grids": 0}, {"confidence": 1.0}, {"cell": "half"}):
        with pytest.raises(OptionError):
            GridOptions(**options)
