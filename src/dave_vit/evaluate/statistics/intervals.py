"""Means with bootstrap intervals, and differences between methods on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from dave_vit.evaluate.statistics.shared import Components, Floats

RESAMPLES = 2000
_BLOCK = 50  # resamples at a time, so that memory does not grow with them
_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(0.975)


@dataclass(frozen=True)
class MeanEstimate:
    """A mean, its 95 % interval, how many numbers it rests on, and of how many distinct pictures they are."""

    mean: float | None
    low: float | None
    high: float | None
    n: int
    images: int


NOTHING = MeanEstimate(None, None, None, 0, 0)


def estimate_means(
    values: Floats, units: Sequence[int], seed: int = 0, *, pictures: Sequence[Sequence[int]] | None = None
) -> list[MeanEstimate]:
    """The mean of each row of numbers, with percentile intervals of a bootstrap over pictures.

    Numbers of one unit, such as the cells of a grid, are drawn together: they are no independent witnesses. Where units
    share pictures, pictures are drawn instead, and the spread so found is brought to the variance that `Components`
    tells. The percentiles are those of Student's distribution, so that intervals hold for few pictures as well.

    Args:
        values: [rows, numbers]; NaN where there is none.
        units: which unit each number belongs to, counted from 0.
        seed: of the draws; all rows share them.
        pictures: of each unit, counted from 0; a unit is one picture where nothing is said.
    """
    there = np.isfinite(values)
    sums, counts = (_by_unit(part, units) for part in (np.where(there, values, 0.0), there.astype(np.float64)))
    totals = counts.sum(1)
    means = np.divide(sums.sum(1), totals, out=np.full(len(totals), np.nan), where=totals > 0)
    own = [[unit] for unit in range(counts.shape[1])] if pictures is None else pictures
    if len({one for shown in own for one in shown}) < sum(map(len, own)):  # units share pictures
        members = _members(own)
        spread, tails = _of_pictures(sums, counts, means, members, seed)
        images = ((counts > 0) @ members > 0).sum(1)
    else:
        spread, tails = _resampled(sums, counts, seed), _tails((counts > 0).sum(1))
        images = (counts > 0) @ np.array([len(shown) for shown in own])
    lows, highs = _percentiles(spread, np.asarray(tails))
    rows = zip(means.tolist(), lows.tolist(), highs.tolist(), totals.astype(int).tolist(), images.tolist(), strict=True)
    return [MeanEstimate(*row) if row[3] else NOTHING for row in rows]


def estimate_differences(
    values: Floats, units: Sequence[int], seed: int = 0, *, pictures: Sequence[Sequence[int]] | None = None
) -> list[tuple[int, int, MeanEstimate]]:
    """For each two rows, the mean of the first minus the second over the numbers that both have."""
    pairs = [(i, j) for i in range(len(values)) for j in range(i + 1, len(values))]
    if not pairs:
        return []
    differences = np.stack([values[i] - values[j] for i, j in pairs])
    means = estimate_means(differences, units, seed, pictures=pictures)
    return [(i, j, estimate) for (i, j), estimate in zip(pairs, means, strict=True)]


def _by_unit(values: Floats, units: Sequence[int]) -> Floats:
    """Sums over the numbers of each unit: [rows, units]."""
    count = max(units, default=-1) + 1
    return np.stack([np.bincount(units, weights=row, minlength=count) for row in values])


def _members(pictures: Sequence[Sequence[int]]) -> Floats:
    """1 where a unit shows a picture: [units, pictures]."""
    members = np.zeros((len(pictures), 1 + max((one for own in pictures for one in own), default=-1)))
    for unit, own in enumerate(pictures):
        members[unit, list(own)] = 1
    return members


def _of_pictures(sums: Floats, counts: Floats, means: Floats, members: Floats, seed: int) -> tuple[Floats, list[float]]:
    """The spread of means over pictures drawn with replacement, [RESAMPLES, rows], and its outer percentiles."""
    spread = _resampled(sums @ members, counts @ members, seed)
    centred = sums - np.nan_to_num(means)[:, None] * counts
    tails = np.full(len(sums), 0.025)
    layouts, of_row = np.unique(counts, axis=0, return_inverse=True)
    for number, layout in enumerate(layouts):
        rows = np.flatnonzero(of_row.ravel() == number)
        if layout.any():
            variance, free = Components(layout, members).variance(centred[rows])
            found = np.nanvar(spread[:, rows], axis=0)
            scale = np.sqrt(np.divide(variance, found, out=np.zeros_like(found), where=found > 0))
            spread[:, rows] = means[rows] + scale * (spread[:, rows] - np.nanmean(spread[:, rows], axis=0))
            tails[rows] = [_NORMAL.cdf(-_student(one)) for one in free]
    return spread, tails.tolist()


def _tails(units: npt.NDArray[np.int64]) -> list[float]:
    """The percentiles of a bootstrap over so many units; its own spread is too small by the root of (n - 1) / n."""
    return [_NORMAL.cdf(-_student(max(n - 1, 1)) * (n / max(n - 1, 1)) ** 0.5) for n in units.tolist()]


def _student(free: float) -> float:
    """The 97.5 % point of Student's distribution, by its expansion (Abramowitz and Stegun 26.7.5)."""
    z = _Z
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / free**power for power, term in enumerate(terms, 1))


def _resampled(sums: Floats, counts: Floats, seed: int) -> Floats:
    """Means of units drawn with replacement: [RESAMPLES, rows]."""
    draw = np.random.default_rng(seed)
    units = sums.shape[1]
    means = []
    for _ in range(RESAMPLES // _BLOCK if units else 0):
        picked = [np.bincount(draw.integers(units, size=units), minlength=units) for _ in range(_BLOCK)]
        weights = np.stack(picked).astype(np.float64)  # [_BLOCK, units]
        total = weights @ counts.T
        means.append(np.divide(weights @ sums.T, total, out=np.full(total.shape, np.nan), where=total > 0))
    return np.concatenate(means) if means else np.empty((0, len(sums)))


def _percentiles(spread: Floats, tails: Floats) -> Floats:
    """The lower and the upper end of the interval of each row, [2, rows], between neighbours where need be."""
    ordered, columns = np.sort(spread, axis=0), np.arange(spread.shape[1])  # what is missing comes last
    last = np.maximum(np.isfinite(ordered).sum(0) - 1, 0)
    place = np.stack([tails, 1 - tails]) * last
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, last)
    share = place - below
    return np.asarray((1 - share) * ordered[below, columns] + share * ordered[above, columns])
