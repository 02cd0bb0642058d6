"""From rows to tables of numbers, one per model and metric: a row per method, a column per image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dave_vit.evaluate.statistics.rows import read
from dave_vit.evaluate.statistics.shared import Floats

_COLUMNS = """model method metric image unit pictures target value dropped versions device passes map_seconds seconds
    curve at""".split()


@dataclass
class _Curves:
    """The sum of curves, as they come in."""

    at: list[float]
    total: Floats
    count: int = 0


class ScoreTable:
    """All numbers of one metric.

    Args:
        methods: labels, one row each.
    """

    def __init__(self, methods: Sequence[str]) -> None:
        self.methods = list(methods)
        self.columns: dict[str, int] = {}
        self.units: list[int] = []
        self._curves: dict[str, _Curves] = {}
        self._costs = np.zeros((len(methods), 4))  # passes, seconds of maps and of the metric, and of how many maps
        self._empty: list[dict[str, str]] = [{} for _ in methods]
        self.pictures: list[list[int]] = []  # of each unit
        self._unit: dict[str, int] = {}
        self._picture: dict[str, int] = {}
        self._shown: dict[str, object] = {}
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

    def shows(self, image: str) -> object:
        """What a number is of: the pictures of its grid and the explained class; None where there is no such number."""
        return self._shown.get(image)

    def reasons(self, method: int) -> Counter[str]:
        """Why images have no number, and how many of them."""
        scored = self._count[method]
        return Counter(reason for image, reason in self._reasons[method].items() if not scored[self.columns[image]])

    def empty(self, method: int) -> Counter[str]:
        """Why maps count as the worst there is, and how many of them."""
        return Counter(self._empty[method].values())

    def costs(self, method: int) -> dict[str, float | None]:
        """What a map of a method took on average, and its score."""
        *totals, maps = self._costs[method].tolist()
        means = [total / maps if maps else None for total in totals]
        return dict(zip(("passes", "map_seconds", "seconds"), means, strict=True))

    def mean_curves(self) -> dict[str, tuple[Floats, Floats]]:
        """By method, where on the axis the steps of its curves are, and the mean of the curves there."""
        kept = ((name, self._curves[name]) for name in self.methods if name in self._curves)
        return {name: (np.asarray(curve.at), curve.total / curve.count) for name, curve in kept}

    def add(self, row: dict[str, Any]) -> None:
        """Takes up one row of the run."""
        column = self._column(row)
        method = self.methods.index(row["method"])
        if row["passes"] is not None:
            self._costs[method] += (row["passes"], row["map_seconds"], row["seconds"], 1)
        if row["value"] is None:
            self._reasons[method][row["image"]] = row["dropped"]
            return
        if row["dropped"]:
            self._empty[method][row["image"]] = row["dropped"]
        self._sum[method, column] += row["value"]
        self._count[method, column] += 1
        if row["curve"] is not None:
            self._add_curve(row)

    def _column(self, row: dict[str, Any]) -> int:
        image, unit = row["image"], row["unit"]
        if image not in self.columns:
            if len(self.columns) == self._sum.shape[1]:
                self._sum, self._count = (
                    np.pad(part, ((0, 0), (0, part.shape[1]))) for part in (self._sum, self._count)
                )
            self.columns[image] = len(self.columns)
            if unit not in self._unit:
                self._unit[unit] = len(self._unit)
                shown = row["pictures"] or [unit]
                self.pictures.append([self._picture.setdefault(one, len(self._picture)) for one in shown])
            self.units.append(self._unit[unit])
            self._shown[image] = (row["pictures"], row["target"])
        return self.columns[image]

    def _add_curve(self, row: dict[str, Any]) -> None:
        steps = np.asarray(row["curve"], dtype=np.float64)
        curve = self._curves.setdefault(row["method"], _Curves(row["at"], np.zeros_like(steps)))
        curve.total += steps
        curve.count += 1


@dataclass
class ModelScores:
    """The rows of one model."""

    tables: dict[str, ScoreTable] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)


def read_scores(
    paths: Iterable[Path], methods: Sequence[str], into: dict[str, ModelScores] | None = None
) -> dict[str, ModelScores]:
    """Reads rows, file by file; by the label of their model.

    Args:
        paths: of the Parquet files.
        methods: labels of the plan.
        into: what was read before, to which these are added.
    """
    models = {} if into is None else into
    for columns in read(paths, _COLUMNS):
        for values in zip(*(columns[name] for name in _COLUMNS), strict=True):
            row = dict(zip(_COLUMNS, values, strict=True))
            own = models.setdefault(row["model"], ModelScores())
            own.versions.add(row["versions"])
            own.devices.add(row["device"])
            own.tables.setdefault(row["metric"], ScoreTable(methods)).add(row)
    return models


def rank_columns(values: Floats, *, higher_is_better: bool) -> npt.NDArray[np.int64]:
    """Columns of a row of numbers from best to worst; those without a number are left out."""
    there = np.flatnonzero(np.isfinite(values))
    order = there[np.argsort(values[there], kind="stable")]
    return np.asarray(order[::-1] if higher_is_better else order)
