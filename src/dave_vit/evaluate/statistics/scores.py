"""Score tables, one per model and metric: a row per method, a column per image."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dave_vit.evaluate.statistics.intervals import Floats
from dave_vit.evaluate.statistics.rows import Row, arrow_schema, import_pyarrow, read_tables

_COSTS = ("passes", "map_seconds", "seconds")
_COLUMNS = ("method", "image", "unit", "pictures", "target", "value", "dropped", *_COSTS)
_ALL_COLUMNS = (*_COLUMNS, "model", "metric", "versions", "device", "curve", "at")


CurveSum = tuple[Floats, Floats, int]
"""The horizontal axis of some curves, their sum, and their number."""


class ScoreTable:
    """All scores of one metric on one model.

    Args:
        methods: labels, one row each.
        rows: Arrow table with the columns of `Row`; no rows by default.
        curves: sums of the curves by method.

    Attributes:
        values: scores, mean over seeds, NaN if there is none, ``[methods, images]``.
        images: names of the columns.
        columns: index of each image by its name.
        units: index of the unit of each image.
        pictures: indices of the pictures of each unit.
        contents: pictures and explained class of each image; the same in two runs if their scores can be compared.
    """

    def __init__(self, methods: Sequence[str], rows: Any = None, curves: dict[str, CurveSum] | None = None) -> None:
        arrow = import_pyarrow()
        rows = (arrow_schema(Row).empty_table() if rows is None else rows).select(_COLUMNS).combine_chunks()
        self.methods, self._curves = list(methods), curves or {}
        self.images, images, first = _encode(rows["image"])
        self.columns = {name: column for column, name in enumerate(self.images)}
        method = arrow.compute.index_in(rows["method"].cast("string"), arrow.array(self.methods, "string")).to_numpy()
        values = rows["value"].to_numpy()
        scored = ~np.isnan(values)
        where = method[scored], images[scored]
        sums, counts = np.zeros((2, len(methods), len(self.images)))
        np.add.at(sums, where, values[scored])
        np.add.at(counts, where, 1)
        self.values: Floats = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
        by_image = rows.take(first)
        contents = zip(by_image["pictures"].to_pylist(), by_image["target"].to_pylist(), strict=True)
        self.contents = dict(zip(self.images, contents, strict=True))
        _, units, first = _encode(by_image["unit"])
        self.units: list[int] = units.tolist()
        known: dict[str, int] = {}
        shown = by_image.take(first).select(["unit", "pictures"]).to_pylist()
        names = (row["pictures"] or [row["unit"]] for row in shown)
        self.pictures = [[known.setdefault(name, len(known)) for name in own] for own in names]
        dropped = rows.filter(rows["dropped"].is_valid())
        self._dropped = dropped.select(["method", "image", "value", "dropped"]).to_pylist()
        means = rows.filter(rows["passes"].is_valid()).group_by("method").aggregate([(name, "mean") for name in _COSTS])
        self._costs = {row["method"]: {name: row[f"{name}_mean"] for name in _COSTS} for row in means.to_pylist()}

    def count_reasons(self, method: int) -> Counter[str]:
        """Count why images have no score."""
        label, values = self.methods[method], self.values[method]
        reasons = {row["image"]: row["dropped"] for row in self._dropped if row["method"] == label}
        return Counter(reason for image, reason in reasons.items() if np.isnan(values[self.columns[image]]))

    def count_empty(self, method: int) -> int:
        """Count images whose map is empty and counts as the worst."""
        label = self.methods[method]
        return len({row["image"] for row in self._dropped if row["method"] == label and row["value"] is not None})

    def costs(self, method: int) -> dict[str, float | None]:
        """Return the mean cost of a map of a method, and of its score."""
        return self._costs.get(self.methods[method], dict.fromkeys(_COSTS))

    def mean_curves(self) -> dict[str, tuple[Floats, Floats]]:
        """Return the horizontal axis and the mean curve of each method that has curves, ``[steps]`` each."""
        curves = ((name, self._curves[name]) for name in self.methods if name in self._curves)
        return {name: (at, total / count) for name, (at, total, count) in curves}


@dataclass
class ModelScores:
    """Scores of one model by metric, with the versions and devices that computed them."""

    tables: dict[str, ScoreTable] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)


def read_scores(paths: Iterable[Path], methods: Sequence[str]) -> dict[str, ModelScores]:
    """Read the scores of a run from its Parquet files, by the label of the model.

    Curves are summed as they are read, so that memory does not grow with their number.

    Args:
        paths: files of rows.
        methods: labels of the plan.
    """
    models: dict[str, ModelScores] = {}
    parts: dict[tuple[str, str], list[Any]] = {}
    curves: dict[tuple[str, str], dict[str, CurveSum]] = {}
    for rows in read_tables(paths, _ALL_COLUMNS):
        for key, part in _split(rows, "model", "metric"):
            scores = models.setdefault(key[0], ModelScores())
            scores.versions.update(part["versions"].unique().to_pylist())
            scores.devices.update(part["device"].unique().to_pylist())
            parts.setdefault(key, []).append(part.select(_COLUMNS))
            _add_curves(curves.setdefault(key, {}), part.filter(part["curve"].is_valid()))
    for (model, metric), own in parts.items():
        # dictionaries differ from file to file, which grouping does not allow
        rows = import_pyarrow().concat_tables(own).unify_dictionaries()
        models[model].tables[metric] = ScoreTable(methods, rows, curves[model, metric])
    return models


def _add_curves(curves: dict[str, CurveSum], rows: Any) -> None:
    for (method,), part in _split(rows, "method"):
        steps = np.asarray(part["curve"].combine_chunks().flatten(), dtype=np.float64).reshape(len(part), -1)
        at, total, count = curves.get(method, (np.asarray(part["at"][0].as_py()), np.zeros(steps.shape[1]), 0))
        curves[method] = at, total + steps.sum(0), count + len(part)


def rank_columns(values: Floats, *, higher_is_better: bool) -> npt.NDArray[np.int64]:
    """Return the columns of a row of scores from best to worst, without those that have no score."""
    finite = np.flatnonzero(np.isfinite(values))
    order = finite[np.argsort(values[finite], kind="stable")]
    return np.asarray(order[::-1] if higher_is_better else order)


def _encode(names: Any) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the distinct names in order of appearance, the index of each name, and where each first appears."""
    encoded = names.combine_chunks().dictionary_encode()
    indices = encoded.indices.to_numpy()
    return encoded.dictionary.to_pylist(), indices, np.unique(indices, return_index=True)[1]


def _split(rows: Any, *columns: str) -> Iterator[tuple[Any, Any]]:
    """Yield each combination of values of some columns, with its rows."""
    for key in rows.select(columns).group_by(list(columns), use_threads=False).aggregate([]).to_pylist():
        part = rows
        for name, value in key.items():
            part = part.filter(import_pyarrow().compute.equal(part[name], value))
        yield tuple(key.values()), part
