"""Means with confidence intervals, and differences between methods on the same images."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dave_vit.errors import import_optional

Floats = npt.NDArray[np.float64]
Range = tuple[float, float] | None
"""The least and the largest possible score, if there are any."""
Pictures = Sequence[Sequence[int]]
"""Indices of the pictures of each unit."""

MIN_IMAGES = 6  # fewer images have no interval: their spread says too little


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
    values: Floats, units: Sequence[int], *, pictures: Pictures | None = None, bounds: Range = None
) -> list[MeanEstimate]:
    """Estimate the mean of each row of scores with its 95 % interval; there is none below six pictures.

    Scores of one unit, such as the cells of a grid, are not independent: the variance of the mean is that of unit sums,
    and that of `_estimate_variance` if units share pictures. Intervals are those of Student's t distribution; within
    bounds, they are Wilson's with that quantile and the effective sample size (Korn and Graubard, 1998; Franco et al.,
    2019).

    Args:
        values: scores ``[rows, columns]``; NaN if there is none.
        units: index of the unit of each column.
        pictures: indices of the pictures of each unit; each unit is one picture by default.
        bounds: least and largest possible score, if there are any.
    """
    if not values.size:
        return [NO_ESTIMATE] * len(values)
    finite = np.isfinite(values)
    sums, counts = (_sum_by_unit(part, units) for part in (np.where(finite, values, 0.0), finite.astype(np.float64)))
    totals, present = counts.sum(1), counts > 0
    means = np.divide(sums.sum(1), totals, out=np.zeros(len(totals)), where=totals > 0)
    centred = sums - means[:, None] * counts
    shown = [[unit] for unit in range(counts.shape[1])] if pictures is None else pictures
    if len({picture for own in shown for picture in own}) < sum(map(len, shown)):
        members = _membership(shown)
        variance, freedom = _estimate_components(centred, counts, members)
        images = (present @ members > 0).sum(1)
    else:
        freedom = present.sum(1) - 1.0
        scale = np.divide(freedom + 1, freedom, out=np.zeros_like(freedom), where=freedom > 0)
        variance = scale * np.square(centred).sum(1) / np.maximum(totals, 1) ** 2
        images = present @ np.array([len(own) for own in shown])
    lows, highs = _compute_interval(means, variance, freedom, bounds)
    rows = zip(means.tolist(), lows.tolist(), highs.tolist(), totals.astype(int).tolist(), images.tolist(), strict=True)
    return [_build_estimate(*row) for row in rows]


def estimate_differences(
    values: Floats, units: Sequence[int], *, pictures: Pictures | None = None, bounds: Range = None
) -> list[tuple[int, int, MeanEstimate]]:
    """Estimate, for each two rows, the mean of the first minus the second over the columns that both have."""
    first, second = np.triu_indices(len(values), 1)
    means = estimate_means(values[first] - values[second], units, pictures=pictures, bounds=difference_bounds(bounds))
    return list(zip(first.tolist(), second.tolist(), means, strict=True))


def difference_bounds(bounds: Range) -> Range:
    """Return the least and the largest possible difference of two scores within bounds."""
    return bounds and (bounds[0] - bounds[1], bounds[1] - bounds[0])


def excludes_zero(result: Mapping[str, Any]) -> bool:
    """Return whether a result has an interval, and zero is outside of it."""
    return result["low"] is not None and (result["low"] > 0 or result["high"] < 0)


def describe_comparisons(results: Iterable[Mapping[str, Any]]) -> str:
    """Return a note on how many of several differences would exclude zero by chance alone; "" if there are few."""
    count = sum(one["low"] is not None for one in results)
    chance = f"{count} comparisons at 95 % each: if nothing differed, about {round(count / 20)} would exclude zero"
    return chance if count >= 10 else ""


def _build_estimate(mean: float, low: float, high: float, count: int, images: int) -> MeanEstimate:
    ends: tuple[float | None, float | None] = (low, high) if images >= MIN_IMAGES else (None, None)
    return MeanEstimate(mean, *ends, count, images) if count else NO_ESTIMATE


def _sum_by_unit(values: Floats, units: Sequence[int]) -> Floats:
    """Return sums over the columns of each unit, ``[rows, units]``."""
    return np.stack([np.bincount(units, weights=row, minlength=max(units) + 1) for row in values])


def _membership(pictures: Pictures) -> Floats:
    """Return 1 where a unit shows a picture, ``[units, pictures]``."""
    members = np.zeros((len(pictures), 1 + max(picture for own in pictures for picture in own)))
    for unit, own in enumerate(pictures):
        members[unit, list(own)] = 1
    return members


def _estimate_components(centred: Floats, counts: Floats, members: Floats) -> tuple[Floats, Floats]:
    """Return the variances of means over units that share pictures, and their degrees of freedom, ``[rows]`` each."""
    variance, freedom = np.zeros((2, len(counts)))
    layouts, layout_of_row = np.unique(counts, axis=0, return_inverse=True)
    for number, layout in enumerate(layouts):
        rows, scored = np.flatnonzero(layout_of_row.ravel() == number), layout > 0
        if scored.any():
            parts = centred[rows][:, scored], layout[scored], members[scored]
            variance[rows], freedom[rows] = _estimate_variance(*parts)
    return variance, freedom


def _estimate_variance(centred: Floats, counts: Floats, members: Floats) -> tuple[Floats, Floats]:
    """Return the variance of each mean and its degrees of freedom (Satterthwaite), ``[rows]`` each.

    Unit sums have an effect of each picture and one of the unit itself (random effects). Both variances are estimated
    by the method of moments, so that units with the same picture do not count as independent. Exact for additive
    effects, whatever the number of units per picture.

    Args:
        centred: unit sums of scores minus the mean of all scores, ``[rows, units]``.
        counts: number of scores of each unit, ``[units]``.
        members: 1 where a unit shows a picture, ``[units, pictures]``.
    """
    weight = counts / counts.sum()
    # Coefficients of the effects of units after centring, [units, units], and of pictures, [units, pictures].
    of_units = np.diag(counts) - np.outer(counts, weight)
    of_pictures = of_units @ members
    expected = np.array(  # squares of unit sums, then of picture sums; by picture effects and unit effects
        [
            [np.square(of_pictures).sum(), np.square(of_units).sum()],
            [np.square(members.T @ of_pictures).sum(), np.square(members.T @ of_units).sum()],
        ]
    )
    mean = np.array([np.square(weight @ members).sum(), np.square(weight).sum()])
    squares = np.stack([np.square(centred).sum(1), np.square(centred @ members).sum(1)])  # [2, rows]
    zeros, freedom = np.zeros(len(centred)), np.full(len(centred), max(len(counts) - 1.0, 1.0))
    units_only = np.stack([zeros, _divide(squares[0], expected[0, 1])])
    if not np.any(np.triu(members @ members.T, 1)):  # no units share pictures
        return mean @ units_only, freedom
    pictures_only = np.stack([_divide(squares[1], expected[1, 0]), zeros])
    if np.linalg.matrix_rank(expected) < 2:  # as with two units: take the larger of both
        return np.maximum(mean @ units_only, mean @ pictures_only), freedom
    components = np.linalg.solve(expected, squares)  # variances of picture effects and of unit effects
    components = np.where(components[0] < 0, units_only, np.where(components[1] < 0, pictures_only, components))
    variance, traces = mean @ components, _compute_traces(expected, mean, counts, members)
    spread = np.einsum("ir,ij,jr->r", components, traces, components)
    estimated = np.divide(np.square(variance), spread, out=freedom.copy(), where=(spread > 0) & (components[0] > 0))
    return variance, np.clip(estimated, 2.0, freedom)


def _compute_traces(expected: Floats, mean: Floats, counts: Floats, members: Floats) -> Floats:
    """Return the traces that give the variance of the variance estimate, ``[2, 2]``."""
    share, units = np.linalg.solve(expected.T, mean), np.eye(len(counts))
    overlap = members @ members.T
    centring = units - np.outer(counts, np.ones(len(counts))) / counts.sum()
    form = centring.T @ (share[0] * units + share[1] * overlap) @ centring
    parts = [form @ (counts[:, None] * kind * counts) for kind in (overlap, units)]
    return np.array([[(one * other.T).sum() for other in parts] for one in parts])


def _divide(squares: Floats, expected: float) -> Floats:
    """Return zero where nothing can differ, as within one unit."""
    return squares / expected if expected > 0 else np.zeros_like(squares)


def _compute_interval(means: Floats, variance: Floats, freedom: Floats, bounds: Range) -> tuple[Floats, Floats]:
    """Return the lower and upper ends of 95 % intervals, ``[rows]`` each.

    Wilson's interval takes the variance of a share p as p (1 - p) / n at the true p instead of the estimated one. With
    n = p (1 - p) / variance it is that of any score within bounds, and never leaves them.
    """
    stats = import_optional("scipy.stats", extra="eval")
    quantile = stats.t.ppf(0.975, np.maximum(freedom, 1))
    if bounds is None:
        half = quantile * np.sqrt(variance)
        return means - half, means + half
    low, width = bounds[0], bounds[1] - bounds[0]
    share = np.clip((means - low) / width, 0, 1)
    spread, variance = share * (1 - share), variance / width**2
    # Scores that all lie on a bound have no spread: each unit then counts as one draw.
    inverse_size = np.divide(variance, spread, out=1 / np.maximum(freedom + 1, 1), where=spread > 0)
    gain = quantile**2 * inverse_size
    centre = (share + gain / 2) / (1 + gain)
    half = np.sqrt(gain * spread + gain**2 / 4) / (1 + gain)
    ends = (low + width * np.clip(centre + sign * half, 0, 1) for sign in (-1, 1))
    return np.minimum(next(ends), means), np.maximum(next(ends), means)
