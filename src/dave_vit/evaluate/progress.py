"""Results of a run that is not finished, from the rows written so far."""

from __future__ import annotations

from pathlib import Path

from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.statistics.scores import ScoreReader
from dave_vit.evaluate.statistics.summary import Result, summarise_model
from dave_vit.evaluate.store import DamagedFile


class PartialResults:
    """Results of the rows that a run has so far; each file is read once.

    Args:
        plan: the plan of the run.
        out: its folder.
    """

    def __init__(self, plan: Plan, out: Path) -> None:
        self._plan, self._folder = plan, out / "rows"
        self._read: set[Path] = set()
        self._reader = ScoreReader([entry.label for entry in plan.methods])

    def results(self) -> list[Result]:
        """Return results as in ``summary.json``."""
        for path in sorted(set(self._folder.glob("*.parquet")) - self._read):
            self._read.add(path)
            try:
                self._reader.read([path])
            except DamagedFile:  # the run itself reports it and computes it again
                continue
        scores = self._reader.scores()
        return [one for model in scores for one in summarise_model(self._plan, model, scores[model], {})]
