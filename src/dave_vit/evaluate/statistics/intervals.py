"""Means with bootstrap intervals, and differences between methods on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dave_vit.errors import require_extra
from dave_vit.evaluate.statistics.variance import Floats, VarianceComponents

RESAMPLES = 2000
_BLOCK = 50  # resamples at a time, so that memory does not grow with them


@dataclass(frozen=True)
class MeanEstimate:
    """A mean, its 95 % interval, the number of scores, and the number of distinct pictures that they show."""

    mean: float | None
    low: float | None
    high: float | None
    n: int
    images: int


NO_ESTIMATE = MeanEstimate(None, None, None, 0, 0)


def estimate_means(
    values: Floats, units: Sequence[int], seed: int = 0, *, pictures: Sequence[Sequence[int]] | None = None
) -> list[MeanEstimate]:
    """Estimate the mean of each row of scores, with percentile intervals of a bootstrap over pictures.

    Scores of one unit, such as the cells of a grid, are not independent and are resampled together. If units share
    pictures, pictures are resampled instead, and the spread is scaled to the variance of `VarianceComponents`. The
    percentiles are those of Student's t distribution, so that intervals hold for few pictures as well.

    Args:
        values: scores ``[rows, columns]``; NaN if there is none.
        units: index of the unit of each column.
        seed: seed of the resampling; all rows share the samples.
        pictures: indices of the pictures of each unit; each unit is one picture by default.
    """
    if not values.size:
        return [NO_ESTIMATE] * len(values)
    finite = np.isfinite(values)
    sums, counts = (_sum_by_unit(part, units) for part in (np.where(finite, values, 0.0), finite.astype(np.float64)))
    totals = counts.sum(1)
    means = np.divide(sums.sum(1), totals, out=np.full(len(totals), np.nan), where=totals > 0)
    shown = [[unit] for unit in range(counts.shape[1])] if pictures is None else pictures
    if len({picture for own in shown for picture in own}) < sum(map(len, shown)):  # units share pictures
        members = _membership(shown)
        spread, tails = _resample_pictures(sums, counts, means, members, seed)
        images = ((counts > 0) @ members > 0).sum(1)
    else:
        spread, tails = _resample(sums, counts, seed), _bootstrap_tails((counts > 0).sum(1))
        images = (counts > 0) @ np.array([len(own) for own in shown])
    lows, highs = _percentiles(spread, tails)
    rows = zip(means.tolist(), lows.tolist(), highs.tolist(), totals.astype(int).tolist(), images.tolist(), strict=True)
    return [MeanEstimate(*row) if row[3] else NO_ESTIMATE for row in rows]


def estimate_differences(
    values: Floats, units: Sequence[int], seed: int = 0, *, pictures: Sequence[Sequence[int]] | None = None
) -> list[tuple[int, int, MeanEstimate]]:
    """Estimate, for each two rows, the mean of the first minus the second over the columns that both have."""
    first, second = np.triu_indices(len(values), 1)
    means = estimate_means(values[first] - values[second], units, seed, pictures=pictures)
    return list(zip(first.tolist(), second.tolist(), means, strict=True))


def _sum_by_unit(values: Floats, units: Sequence[int]) -> Floats:
    """Return sums over the columns of each unit, ``[rows, units]``."""
    return np.stack([np.bincount(units, weights=row, minlength=max(units) + 1) for row in values])


def _membership(pictures: Sequence[Sequence[int]]) -> Floats:
    """Return 1 where a unit shows a picture, ``[units, pictures]``."""
    members = np.zeros((len(pictures), 1 + max(picture for own in pictures for picture in own)))
    for unit, own in enumerate(pictures):
        members[unit, list(own)] = 1
    return members


def _resample_pictures(
    sums: Floats, counts: Floats, means: Floats, members: Floats, seed: int
) -> tuple[Floats, Floats]:
    """Return means over resampled pictures, ``[RESAMPLES, rows]``, and the percentile of each lower end, ``[rows]``."""
    spread = _resample(sums @ members, counts @ members, seed)
    centred = sums - np.nan_to_num(means)[:, None] * counts
    tails = np.full(len(sums), 0.025)
    layouts, layout_of_row = np.unique(counts, axis=0, return_inverse=True)
    for number, layout in enumerate(layouts):
        rows = np.flatnonzero(layout_of_row.ravel() == number)
        if layout.any():
            variance, freedom = VarianceComponents(layout, members).estimate(centred[rows])
            resampled = np.nanvar(spread[:, rows], axis=0)
            scale = np.sqrt(np.divide(variance, resampled, out=np.zeros_like(resampled), where=resampled > 0))
            spread[:, rows] = means[rows] + scale * (spread[:, rows] - np.nanmean(spread[:, rows], axis=0))
            tails[rows] = _normal_tail(freedom)
    return spread, tails


def _bootstrap_tails(units: npt.NDArray[np.int64]) -> Floats:
    """Return the percentiles for numbers of units; a bootstrap's spread is too small by the root of (n - 1) / n."""
    freedom = np.maximum(units - 1.0, 1.0)
    return _normal_tail(freedom, np.sqrt(units / freedom))


def _normal_tail(freedom: Floats, scale: Floats | float = 1.0) -> Floats:
    """Return the percentile of a normal distribution at the 2.5 % point of Student's t distribution, times a scale."""
    with require_extra("scipy", "eval"):
        from scipy.stats import norm, t  # type: ignore[import-untyped]
    return np.asarray(norm.cdf(t.ppf(0.025, freedom) * scale))


def _resample(sums: Floats, counts: Floats, seed: int) -> Floats:
    """Return means of units drawn with replacement, ``[RESAMPLES, rows]``."""
    generator = np.random.default_rng(seed)
    units = sums.shape[1]
    means = []
    for _ in range(RESAMPLES // _BLOCK):
        draws = [np.bincount(generator.integers(units, size=units), minlength=units) for _ in range(_BLOCK)]
        weights = np.stack(draws).astype(np.float64)  # [_BLOCK, units]
        total = weights @ counts.T
        means.append(np.divide(weights @ sums.T, total, out=np.full(total.shape, np.nan), where=total > 0))
    return np.concatenate(means)


def _percentiles(spread: Floats, tails: Floats) -> Floats:
    """Return the lower and the upper end of the interval of each row, ``[2, rows]``, interpolated linearly."""
    ordered, columns = np.sort(spread, axis=0), np.arange(spread.shape[1])  # NaN comes last
    last = np.maximum(np.isfinite(ordered).sum(0) - 1, 0)
    position = np.stack([tails, 1 - tails]) * last
    below = np.floor(position).astype(np.int64)
    above = np.minimum(below + 1, last)
    share = position - below
    return np.asarray((1 - share) * ordered[below, columns] + share * ordered[above, columns])
