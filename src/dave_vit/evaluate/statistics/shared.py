"""The variance of a mean of units that share pictures, such as grids in which each image stands several times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Components:
    """How units hang together: their sums are modelled as effects of their pictures and an effect of their own.

    Both variances are found by their moments, so that no unit counts as an independent witness of a picture that
    others show as well. Exact for additive effects, whatever the numbers of units of a picture.

    Args:
        counts: how many numbers each unit has, [units].
        members: 1 where a unit shows a picture, [units, pictures].
    """

    def __init__(self, counts: Floats, members: Floats) -> None:
        kept = counts > 0
        counts, members = counts[kept], members[kept]
        self.kept, self.units = kept, int(kept.sum())
        self._members, self._weight = members, counts / counts.sum()
        # Of the effects of units, after centring: [units, units].
        own = np.diag(counts) - np.outer(counts, self._weight)
        shown = own @ members  # of the effects of pictures
        of_units, of_pictures = (np.square(part).sum() for part in (own, shown))
        both = np.square(members.T @ own).sum(), np.square(members.T @ shown).sum()
        self._expected = np.array([[of_pictures, of_units], [both[1], both[0]]])  # squares of units, then of pictures
        self._mean = np.array([np.square(self._weight @ members).sum(), np.square(self._weight).sum()])
        self.apart = not np.any(np.triu(members @ members.T, 1))
        self.told = bool(np.linalg.matrix_rank(self._expected) == 2)  # effects of pictures from those of units
        if not self.apart and self.told:
            self._traces = self._spread(counts)

    def _spread(self, counts: Floats) -> Floats:
        """Traces that say how sure an estimate of the variance is, [2, 2]."""
        share = np.linalg.solve(self._expected.T, self._mean)
        overlap = self._members @ self._members.T
        centred = np.eye(self.units) - np.outer(counts, np.ones(self.units)) / counts.sum()
        form = centred.T @ (share[0] * np.eye(self.units) + share[1] * overlap) @ centred
        parts = [form @ (counts[:, None] * kind * counts) for kind in (overlap, np.eye(self.units))]
        return np.array([[(one * other.T).sum() for other in parts] for one in parts])

    def variance(self, centred: Floats) -> tuple[Floats, Floats]:
        """The variance of each mean, and the degrees of freedom of that estimate (Satterthwaite).

        Args:
            centred: sums of units of numbers minus the mean of all, [rows, units].
        """
        centred = centred[:, self.kept]
        squares = np.stack([np.square(centred).sum(1), np.square(centred @ self._members).sum(1)])  # [2, rows]
        nothing = np.zeros(len(centred))
        units_alone = np.stack([nothing, _over(squares[0], self._expected[0, 1])])
        free = np.full(len(centred), max(self.units - 1.0, 1.0))
        if self.apart:
            return self._mean @ units_alone, free
        pictures_alone = np.stack([_over(squares[1], self._expected[1, 0]), nothing])
        if not self.told:  # as with two units: the larger of both
            return np.maximum(self._mean @ units_alone, self._mean @ pictures_alone), free
        found = np.linalg.solve(self._expected, squares)  # variances of pictures and of units
        found = np.where(found[0] < 0, units_alone, np.where(found[1] < 0, pictures_alone, found))
        variance = self._mean @ found
        wobble = np.einsum("ir,ij,jr->r", found, self._traces, found)
        known = np.divide(np.square(variance), wobble, out=free.copy(), where=(wobble > 0) & (found[0] > 0))
        return variance, np.clip(known, 2.0, free)


def _over(squares: Floats, expected: float) -> Floats:
    """Zero where nothing can differ, as within one unit."""
    return squares / expected if expected > 0 else np.zeros_like(squares)
