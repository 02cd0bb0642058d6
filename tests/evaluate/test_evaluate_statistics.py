"""Intervals and paired differences."""

from __future__ import annotations

import numpy as np
import pyarrow
import pytest

from dave_vit.data.grids import GridCandidate, GridOptions, choose_grids
from dave_vit.evaluate.statistics.intervals import (
    describe_comparisons,
    estimate_differences,
    estimate_means,
    excludes_zero,
)
from dave_vit.evaluate.statistics.rows import Row, arrow_schema
from dave_vit.evaluate.statistics.scores import ScoreTable, rank_columns


def test_the_interval_is_that_of_theory_for_many_normal_numbers():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    (one,) = estimate_means(values[None], range(400))
    half = 1.96 * values.std(ddof=1) / 20
    assert one.mean == pytest.approx(values.mean())
    assert one.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert one.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_numbers_of_one_unit_are_drawn_together():
    values = np.repeat(np.random.default_rng(1).normal(size=50), 4)  # four cells that say the same
    (apart,) = estimate_means(values[None], range(200))
    (together,) = estimate_means(values[None], np.repeat(range(50), 4).tolist())
    assert apart.mean == pytest.approx(together.mean)
    assert (together.high - together.low) / (apart.high - apart.low) == pytest.approx(2, rel=0.15)


def test_missing_numbers_are_left_out():
    values = np.array([[1.0, np.nan, 3.0], [np.nan] * 3])
    one, none = estimate_means(values, range(3))
    assert (one.mean, one.n) == (2.0, 2)
    assert (none.mean, none.low, none.n) == (None, None, 0)


def test_pairs_use_the_images_that_both_have():
    values = np.array([[1.0, 2.0, np.nan, 4.0], [0.5, 1.0, 9.0, np.nan], [0.0, 0.0, 0.0, 0.0]])
    differences = {(i, j): estimate for i, j, estimate in estimate_differences(values, range(4))}
    assert differences[0, 1].mean == pytest.approx(0.75)
    assert differences[0, 1].n == 2
    assert (differences[0, 2].n, differences[1, 2].n) == (3, 3)


def test_paired_intervals_are_narrower_where_images_differ_more_than_methods():
    draw = np.random.default_rng(2)
    images = draw.normal(size=200)
    values = np.stack([images + 0.1 + draw.normal(scale=0.05, size=200), images])
    ((_, _, difference),) = estimate_differences(values, range(200))
    first, second = estimate_means(values, range(200))
    assert 0 < difference.low < 0.1 < difference.high
    assert first.low < second.high  # the intervals of the means themselves overlap


@pytest.mark.parametrize("count", [6, 10, 30])
@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        (lambda draw, size: draw.random(size), 0.5),
        (lambda draw, size: draw.beta(8, 2, size), 0.8),
        (lambda draw, size: draw.beta(0.5, 0.5, size), 0.5),
        (lambda draw, size: draw.beta(4, 0.4, size), 4 / 4.4),  # most are nearly 1
        (lambda draw, size: draw.random(size) < 0.9, 0.9),  # hits and misses
    ],
    ids=["uniform", "high", "two ends", "skewed", "hits"],
)
def test_intervals_of_shares_cover_the_truth_and_stay_within_their_bounds(draw, truth, count):
    values = draw(np.random.default_rng(0), (2000, count)).astype(np.float64)
    estimates = estimate_means(values, range(count), bounds=(0.0, 1.0))
    assert all(0 <= one.low <= one.mean <= one.high <= 1 for one in estimates)
    assert 0.9 <= np.mean([one.low <= truth <= one.high for one in estimates]) <= 0.995


def test_wilsons_interval_of_hits_and_misses():
    """With many images Student's quantile is the normal one, and the effective sample size n - 1."""
    from scipy.stats import binomtest

    values = np.repeat([1.0, 0.0], [1800, 200])
    (one,) = estimate_means(values[None], range(2000), bounds=(0.0, 1.0))
    expected = binomtest(1800, 2000).proportion_ci(method="wilson")
    assert (one.low, one.high) == pytest.approx((expected.low, expected.high), abs=2e-5)
    (hits,) = estimate_means(np.ones((1, 10)), range(10), bounds=(0.0, 1.0))  # the variance is zero, the doubt is not
    assert 0.6 < hits.low < 0.8
    assert hits.high == 1
    (same,) = estimate_means(np.full((1, 10), 0.7), range(10), bounds=(0.0, 1.0))
    assert (same.low, same.high) == pytest.approx((0.7, 0.7))


def test_intervals_of_grids_that_share_images_stay_within_their_bounds():
    values = np.array([[1.0, 1, 1, 0.2, 1, 1, 1, 1, 1, 0.4, 1, 1]])
    pictures = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0]]
    units = np.repeat(range(6), 2).tolist()
    (free,) = estimate_means(values, units, pictures=pictures)
    (bounded,) = estimate_means(values, units, pictures=pictures, bounds=(0.0, 1.0))
    assert free.high > 1
    assert bounded.low < bounded.mean < bounded.high <= 1


def test_fewer_than_six_images_have_no_interval():
    values = np.random.default_rng(0).random((1, 6))
    (five,), (six,) = (estimate_means(values[:, :count], range(count)) for count in (5, 6))
    assert (five.low, five.high, five.n) == (None, None, 5)
    assert six.low < six.mean < six.high
    (few,) = estimate_means(values, range(6), pictures=[[0, 1], [1, 2], [2, 3], [3, 4], [4, 0], [0, 2]])
    assert (few.low, few.images) == (None, 5)  # six grids, but of five images
    assert not excludes_zero(vars(five))


def test_differences_stay_within_their_bounds():
    values = np.stack([np.ones(8), np.repeat([0.0, 1.0], [7, 1])])
    ((_, _, one),) = estimate_differences(values, range(8), bounds=(0.0, 1.0))
    assert one.mean == 0.875
    assert 0 < one.low < one.high <= 1
    assert excludes_zero(vars(one))


def test_many_comparisons_have_a_note():
    few = [{"low": 0.1, "high": 0.2}] * 9
    assert describe_comparisons(few) == ""
    assert describe_comparisons([*few, {"low": None, "high": None}]) == ""
    assert describe_comparisons([few[0]] * 60).startswith("60 comparisons at 95 % each: if nothing differed, about 3 ")


@pytest.mark.parametrize(("images", "noise"), [(25, 0.0), (25, 1.0), (100, 0.5)])
def test_intervals_of_grids_that_share_images_cover_the_truth(images, noise):
    """As GridPG has it: as many grids as images, each image in about four of them."""
    pool = [GridCandidate(i, i, 0.99) for i in range(images)]
    grids = np.array([grid.images for grid in choose_grids(pool, GridOptions(grids=images))])  # [grids, 4]
    draw, runs = np.random.default_rng(0), 1000
    own, others = draw.normal(size=(2, runs, images))
    distracted = others[:, grids].sum(2, keepdims=True) - others[:, grids]
    scores = own[:, grids] + 0.2 * distracted + noise * draw.normal(size=(runs, *grids.shape))
    scores, units = scores.reshape(runs, -1), np.repeat(range(images), 4).tolist()
    by_image = estimate_means(scores, units, pictures=grids.tolist())
    by_grid = estimate_means(scores, units)
    assert 0.93 <= np.mean([one.low < 0 < one.high for one in by_image]) <= 0.97
    assert np.mean([one.low < 0 < one.high for one in by_grid]) < 0.85  # what is wrong with resampling grids
    assert {(one.n, one.images) for one in by_image} == {(4 * images, images)}


@pytest.mark.parametrize("count", [8, 30])
def test_intervals_of_few_images_cover_the_truth(count):
    values = np.random.default_rng(0).normal(size=(1500, count))
    assert 0.93 <= np.mean([one.low < 0 < one.high for one in estimate_means(values, range(count))]) <= 0.97


def test_grids_that_share_no_image_are_units_of_their_own():
    values = np.random.default_rng(3).normal(size=(2, 40))
    units = np.repeat(range(10), 4).tolist()
    apart = estimate_means(values, units, pictures=np.arange(40).reshape(10, 4).tolist())
    alone = estimate_means(values, units)
    assert [(one.mean, one.low, one.high) for one in apart] == [(one.mean, one.low, one.high) for one in alone]
    assert [one.images for one in apart] == [40, 40]


def test_a_row_without_some_grids_has_the_interval_of_those_it_has():
    draw = np.random.default_rng(4)
    grids = [[i, (i + 1) % 12, (i + 5) % 12, (i + 7) % 12] for i in range(12)]
    values = draw.normal(size=(2, 48))
    values[1, :16] = np.nan
    units = np.repeat(range(12), 4)
    fewer = estimate_means(values[1:, 16:], (units[16:] - 4).tolist(), pictures=grids[4:])[0]
    both = estimate_means(values, units.tolist(), pictures=grids)[1]
    assert (both.n, both.images) == (fewer.n, fewer.images) == (32, 12)
    assert (both.low, both.high) == pytest.approx((fewer.low, fewer.high))


def test_tables_average_seeds_and_keep_reasons():
    usual = {"unit": "", "target": 0, "seed": 0, "versions": "", "device": "", "model": "", "passes": 1.0}
    rows = [
        {**usual, "method": "a", "image": f"i{number}", "value": value} for number in range(100) for value in (1.0, 3.0)
    ]
    rows.append({**usual, "method": "b", "image": "i7", "value": None, "dropped": "why"})
    rows = pyarrow.Table.from_pylist(rows, schema=arrow_schema(Row))
    table = ScoreTable(["a", "b"], rows)
    assert table.values.shape == (2, 100)
    assert (table.values[0] == 2.0).all()
    assert np.isnan(table.values[1]).all()
    assert (table.count_reasons(0), table.count_reasons(1)) == ({}, {"why": 1})


def test_places_go_from_best_to_worst():
    values = np.array([0.2, np.nan, 0.9, 0.5])
    assert rank_columns(values, higher_is_better=True).tolist() == [2, 3, 0]
    assert rank_columns(values, higher_is_better=False).tolist() == [0, 3, 2]


@pytest.mark.parametrize("pictures", [[[0, 1, 2, 3], [0, 4, 5, 6]], [[0, 1, 2, 3], [0, 1, 4, 5], [2, 3, 4, 5]]])
def test_grids_that_are_too_few_to_tell_pictures_from_grids_have_an_interval(pictures):
    values = np.linspace(0.2, 0.9, len(pictures))[None]
    (estimate,) = estimate_means(values, range(len(pictures)), pictures=pictures)
    assert estimate.low < estimate.mean < estimate.high
    assert estimate.images == len({picture for own in pictures for picture in own})
