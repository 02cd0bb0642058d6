"""From the rows of one model to tables of numbers: a row per method, a column per image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dave_vit.bench.numbers.rows import read
from dave_vit.bench.numbers.statistics import Floats

_COLUMNS = "method metric image unit value dropped versions device map_seconds seconds curve at".split()


@dataclass
class Curve:
    """The mean of curves, as they come in."""

    at: list[float]
    total: Floats
    count: int = 0

    @property
    def mean(self) -> Floats:
        """[steps]."""
        return self.total / max(self.count, 1)


class Table:
    """All numbers of one metric.

    Args:
        methods: labels, one row each.
    """

    def __init__(self, methods: Sequence[str]) -> None:
        self.methods = list(methods)
        self.columns: dict[str, int] = {}
        self.units: list[int] = []
        self.curves: dict[str, Curve] = {}
        self.seconds = np.zeros((len(methods), 3))  # of maps, of the metric, and how many
        self._unit: dict[str, int] = {}
        self._sum, self._count = np.zeros((len(methods), 64)), np.zeros((len(methods), 64))
        self._reasons: list[dict[str, str]] = [{} for _ in methods]

    @property
    def values(self) -> Floats:
        """[methods, images], the mean over seeds; NaN where there is none."""
        used = len(self.columns)
        sums, counts = self._sum[:, :used], self._count[:, :used]
        return np.asarray(np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0))

    @property
    def images(self) -> list[str]:
        """Names of the columns."""
        return list(self.columns)

    def reasons(self, method: int) -> Counter[str]:
        """Why images have no number, and how many of them."""
        scored = self._count[method]
        found = self._reasons[method].items()
        return Counter(reason for image, reason in found if not scored[self.columns[image]])

    def add(self, row: dict[str, Any]) -> None:
        """Takes up one row of the run."""
        column = self._column(row["image"], row["unit"])
        method = self.methods.index(row["method"])
        self.seconds[method] += (row["map_seconds"], row["seconds"], 1)
        if row["value"] is None:
            self._reasons[method][row["image"]] = row["dropped"]
            return
        self._sum[method, column] += row["value"]
        self._count[method, column] += 1
        if row["curve"] is not None:
            self._add_curve(row)

    def _column(self, image: str, unit: str) -> int:
        if image not in self.columns:
            if len(self.columns) == self._sum.shape[1]:
                self._sum, self._count = (
                    np.pad(part, ((0, 0), (0, part.shape[1]))) for part in (self._sum, self._count)
                )
            self.columns[image] = len(self.columns)
            self.units.append(self._unit.setdefault(unit, len(self._unit)))
        return self.columns[image]

    def _add_curve(self, row: dict[str, Any]) -> None:
        steps = np.asarray(row["curve"], dtype=np.float64)
        curve = self.curves.setdefault(row["method"], Curve(row["at"], np.zeros_like(steps)))
        curve.total += steps
        curve.count += 1


@dataclass
class Collected:
    """The rows of one model."""

    tables: dict[str, Table] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)


def collect(paths: Iterable[Path], methods: Sequence[str]) -> Collected:
    """Reads rows, file by file.

    Args:
        paths: of the Parquet files.
        methods: labels of the plan.
    """
    found = Collected()
    for columns in read(paths, _COLUMNS):
        found.versions.update(columns["versions"])
        found.devices.update(columns["device"])
        for values in zip(*(columns[name] for name in _COLUMNS), strict=True):
            row = dict(zip(_COLUMNS, values, strict=True))
            found.tables.setdefault(row["metric"], Table(methods)).add(row)
    return found


def places(values: Floats, *, higher_is_better: bool) -> npt.NDArray[np.int64]:
    """Columns of a row of numbers from best to worst; those without a number are left out."""
    there = np.flatnonzero(np.isfinite(values))
    order = there[np.argsort(values[there], kind="stable")]
    return np.asarray(order[::-1] if higher_is_better else order)
