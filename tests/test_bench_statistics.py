"""Intervals and paired differences."""

from __future__ import annotations

import numpy as np
import pytest

from dave_vit.bench.numbers.collect import Table, places
from dave_vit.bench.numbers.statistics import estimates, paired


def test_the_interval_is_that_of_theory_for_many_normal_numbers():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    (one,) = estimates(values[None], range(400))
    half = 1.96 * values.std(ddof=1) / 20
    assert one.mean == pytest.approx(values.mean())
    assert one.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert one.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_numbers_of_one_unit_are_drawn_together():
    values = np.repeat(np.random.default_rng(1).normal(size=50), 4)  # four cells that say the same
    (apart,) = estimates(values[None], range(200))
    (together,) = estimates(values[None], np.repeat(range(50), 4).tolist())
    assert apart.mean == pytest.approx(together.mean)
    assert (together.high - together.low) / (apart.high - apart.low) == pytest.approx(2, rel=0.15)


def test_missing_numbers_are_left_out():
    values = np.array([[1.0, np.nan, 3.0], [np.nan] * 3])
    one, none = estimates(values, range(3))
    assert (one.mean, one.n) == (2.0, 2)
    assert (none.mean, none.low, none.n) == (None, None, 0)


def test_pairs_use_the_images_that_both_have():
    values = np.array([[1.0, 2.0, np.nan, 4.0], [0.5, 1.0, 9.0, np.nan], [0.0, 0.0, 0.0, 0.0]])
    found = {(i, j): estimate for i, j, estimate in paired(values, range(4))}
    assert found[0, 1].mean == pytest.approx(0.75)
    assert found[0, 1].n == 2
    assert (found[0, 2].n, found[1, 2].n) == (3, 3)


def test_paired_intervals_are_narrower_where_images_differ_more_than_methods():
    draw = np.random.default_rng(2)
    images = draw.normal(size=200)
    values = np.stack([images + 0.1 + draw.normal(scale=0.05, size=200), images])
    ((_, _, difference),) = paired(values, range(200))
    first, second = estimates(values, range(200))
    assert 0 < difference.low < 0.1 < difference.high
    assert first.low < second.high  # the intervals of the means themselves overlap


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(0).normal(size=(2, 30))
    assert estimates(values, range(30)) == estimates(values, range(30))
    assert estimates(values, range(30), seed=1) != estimates(values, range(30))


def test_tables_average_seeds_and_keep_reasons():
    table = Table(["a", "b"])
    usual = {"metric": "m", "map_seconds": 1.0, "seconds": 2.0, "dropped": None, "curve": None, "at": None}
    for number in range(100):
        name = f"i{number}"
        table.add({**usual, "method": "a", "image": name, "unit": name, "value": 1.0})
        table.add({**usual, "method": "a", "image": name, "unit": name, "value": 3.0})
    table.add({**usual, "method": "b", "image": "i7", "unit": "i7", "value": None, "dropped": "why"})
    assert table.values.shape == (2, 100)
    assert (table.values[0] == 2.0).all()
    assert np.isnan(table.values[1]).all()
    assert (table.reasons(0), table.reasons(1)) == ({}, {"why": 1})


def test_places_go_from_best_to_worst():
    values = np.array([0.2, np.nan, 0.9, 0.5])
    assert places(values, higher_is_better=True).tolist() == [2, 3, 0]
    assert places(values, higher_is_better=False).tolist() == [0, 3, 2]
