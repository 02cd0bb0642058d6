"""First numbers of a run that is not finished, out of the rows that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.statistics.collect import ModelScores, read_scores
from dave_vit.evaluate.statistics.intervals import estimate_means
from dave_vit.evaluate.store import DamagedFile


class PartialResults:
    """The rows of a run so far; each file is read once.

    Args:
        plan: of the run.
        out: its folder.
    """

    def __init__(self, plan: Plan, out: Path) -> None:
        self._rows, self._methods = out / "rows", [entry.label for entry in plan.methods]
        self._read: set[Path] = set()
        self._models: dict[str, ModelScores] = {}

    def results(self) -> list[dict[str, Any]]:
        """As in ``summary.json``: means with intervals of what is there, in the order of the rows."""
        for path in sorted(set(self._rows.glob("*.parquet")) - self._read):
            self._read.add(path)
            try:
                read_scores([path], self._methods, self._models)
            except DamagedFile:  # the run itself finds it and makes it again
                continue
        return [
            {"model": model, "metric": metric, "method": method, **vars(estimate)}
            for model, rows in self._models.items()
            for metric, table in rows.tables.items()
            for method, estimate in zip(
                table.methods, estimate_means(table.values, table.units, pictures=table.pictures), strict=True
            )
        ]
