"""Variance of a mean over units that share pictures, such as grids in which each image appears several times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class VarianceComponents:
    """Random-effects model of unit sums: an effect of each picture and an effect of the unit itself.

    Both variances are estimated by the method of moments, so that a unit does not count as independent of other units
    with the same picture. Exact for additive effects, whatever the number of units per picture.

    Args:
        counts: number of scores of each unit, ``[units]``.
        members: 1 where a unit shows a picture, ``[units, pictures]``.
    """

    def __init__(self, counts: Floats, members: Floats) -> None:
        self._has_scores = counts > 0
        counts, members = counts[self._has_scores], members[self._has_scores]
        self._units, self._members, self._weight = len(counts), members, counts / counts.sum()
        # Coefficients of the effects of units after centring, [units, units], and of pictures, [units, pictures].
        of_units = np.diag(counts) - np.outer(counts, self._weight)
        of_pictures = of_units @ members
        self._expected = np.array(  # squares of unit sums, then of picture sums; by picture effects and unit effects
            [
                [np.square(of_pictures).sum(), np.square(of_units).sum()],
                [np.square(members.T @ of_pictures).sum(), np.square(members.T @ of_units).sum()],
            ]
        )
        self._mean = np.array([np.square(self._weight @ members).sum(), np.square(self._weight).sum()])
        self._are_disjoint = not np.any(np.triu(members @ members.T, 1))
        self._is_identifiable = bool(np.linalg.matrix_rank(self._expected) == 2)
        if not self._are_disjoint and self._is_identifiable:
            self._traces = self._compute_traces(counts)

    def _compute_traces(self, counts: Floats) -> Floats:
        """Return the traces that give the variance of the variance estimate, ``[2, 2]``."""
        share = np.linalg.solve(self._expected.T, self._mean)
        overlap = self._members @ self._members.T
        centring = np.eye(self._units) - np.outer(counts, np.ones(self._units)) / counts.sum()
        form = centring.T @ (share[0] * np.eye(self._units) + share[1] * overlap) @ centring
        parts = [form @ (counts[:, None] * kind * counts) for kind in (overlap, np.eye(self._units))]
        return np.array([[(one * other.T).sum() for other in parts] for one in parts])

    def estimate(self, centred: Floats) -> tuple[Floats, Floats]:
        """Return the variance of each mean and its degrees of freedom (Satterthwaite), ``[rows]`` each.

        Args:
            centred: unit sums of scores minus the mean of all scores, ``[rows, units]``.
        """
        centred = centred[:, self._has_scores]
        squares = np.stack([np.square(centred).sum(1), np.square(centred @ self._members).sum(1)])  # [2, rows]
        zeros = np.zeros(len(centred))
        units_only = np.stack([zeros, _divide(squares[0], self._expected[0, 1])])
        freedom = np.full(len(centred), max(self._units - 1.0, 1.0))
        if self._are_disjoint:
            return self._mean @ units_only, freedom
        pictures_only = np.stack([_divide(squares[1], self._expected[1, 0]), zeros])
        if not self._is_identifiable:  # as with two units: take the larger of both
            return np.maximum(self._mean @ units_only, self._mean @ pictures_only), freedom
        components = np.linalg.solve(self._expected, squares)  # variances of picture effects and of unit effects
        components = np.where(components[0] < 0, units_only, np.where(components[1] < 0, pictures_only, components))
        variance = self._mean @ components
        spread = np.einsum("ir,ij,jr->r", components, self._traces, components)
        estimated = np.divide(np.square(variance), spread, out=freedom.copy(), where=(spread > 0) & (components[0] > 0))
        return variance, np.clip(estimated, 2.0, freedom)


def _divide(squares: Floats, expected: float) -> Floats:
    """Return zero where nothing can differ, as within one unit."""
    return squares / expected if expected > 0 else np.zeros_like(squares)
