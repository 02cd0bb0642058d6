"""Means with bootstrap intervals, and differences between methods on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RESAMPLES = 2000
_BLOCK = 50  # resamples at a time, so that memory does not grow with them


@dataclass(frozen=True)
class Estimate:
    """A mean, its 95 % interval, and how many numbers it rests on."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


def estimates(values: Floats, units: Sequence[int], seed: int = 0) -> list[Estimate]:
    """The mean of each row of numbers, with percentile intervals of a bootstrap over units.

    Numbers of one unit, such as the cells of a grid, are drawn together: they are no independent witnesses.

    Args:
        values: [rows, numbers]; NaN where there is none.
        units: which unit each number belongs to, counted from 0.
        seed: of the draws; all rows share them.
    """
    there = np.isfinite(values)
    sums, counts = (_by_unit(part, units) for part in (np.where(there, values, 0.0), there.astype(np.float64)))
    spread = _resampled(sums, counts, seed)  # [RESAMPLES, rows]
    totals = counts.sum(1)
    means = np.divide(sums.sum(1), totals, out=np.full(len(totals), np.nan), where=totals > 0)
    return [_estimate(mean, spread[:, row], int(totals[row])) for row, mean in enumerate(means)]


def paired(values: Floats, units: Sequence[int], seed: int = 0) -> list[tuple[int, int, Estimate]]:
    """For each two rows, the mean of the first minus the second over the numbers that both have."""
    pairs = [(i, j) for i in range(len(values)) for j in range(i + 1, len(values))]
    if not pairs:
        return []
    differences = np.stack([values[i] - values[j] for i, j in pairs])
    means = estimates(differences, units, seed)
    return [(i, j, estimate) for (i, j), estimate in zip(pairs, means, strict=True)]


def _by_unit(values: Floats, units: Sequence[int]) -> Floats:
    """Sums over the numbers of each unit: [rows, units]."""
    count = max(units, default=-1) + 1
    return np.stack([np.bincount(units, weights=row, minlength=count) for row in values])


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


def _estimate(mean: float, spread: Floats, n: int) -> Estimate:
    if not n:
        return Estimate(None, None, None, 0)
    low, high = np.nanquantile(spread, (0.025, 0.975))
    return Estimate(float(mean), float(low), float(high), n)
