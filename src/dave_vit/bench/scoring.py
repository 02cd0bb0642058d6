"""From maps to rows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dave_vit.bench.numbers.rows import Row
from dave_vit.bench.plan import MetricEntry
from dave_vit.errors import DaveError
from dave_vit.metrics import Case, Metric, Scores


@dataclass(frozen=True)
class Facts:
    """The columns that all rows of a batch share."""

    model: str
    method: str
    seed: int
    versions: str
    device: str
    map_seconds: float = 0.0


@dataclass(frozen=True)
class Named:
    """The columns in which the rows of a batch differ: one entry per row."""

    images: Sequence[str]
    units: Sequence[str]
    targets: Sequence[int]

    def first(self, count: int) -> Named:
        """Those of the first rows."""
        return Named(self.images[:count], self.units[:count], self.targets[:count])


@dataclass(frozen=True)
class Scorer:
    """A metric of the plan, and the hash of all options that decide its values for one method."""

    entry: MetricEntry
    metric: Metric
    options: str

    def rows(self, case: Case, named: Named, facts: Facts) -> list[Row]:
        """The rows of a batch; what the metric cannot do with this model is a reason, never the end of the run."""
        started = clock(case.inputs)
        try:
            scores = self.metric.score(case)
        except DaveError as error:
            return self.dropped(named, facts, [str(error)] * len(named.images))
        seconds = (clock(case.inputs) - started) / len(named.images)
        values: list[float] = scores.values.flatten().double().tolist()
        reasons = [self.metric.reason(case, i) if math.isnan(value) else None for i, value in enumerate(values)]
        curves = _curves(scores, len(values))
        at = list(scores.at) or None
        return [
            self._row(named, i, facts, None if reasons[i] else value, reasons[i], seconds, curves[i], at)
            for i, value in enumerate(values)
        ]

    def dropped(self, named: Named, facts: Facts, reasons: Sequence[str]) -> list[Row]:
        """Rows without a value."""
        return [self._row(named, i, facts, None, reason, 0.0, None, None) for i, reason in enumerate(reasons)]

    def _row(
        self,
        named: Named,
        i: int,
        facts: Facts,
        value: float | None,
        reason: str | None,
        seconds: float,
        curve: list[float] | None,
        at: list[float] | None,
    ) -> Row:
        return Row(
            model=facts.model,
            method=facts.method,
            metric=self.entry.label,
            image=named.images[i],
            unit=named.units[i],
            target=named.targets[i],
            value=value,
            dropped=" ".join(reason.split()) if reason else None,
            seed=facts.seed,
            options=self.options,
            versions=facts.versions,
            device=facts.device,
            map_seconds=facts.map_seconds,
            seconds=seconds,
            curve=curve if value is not None else None,
            at=at if value is not None else None,
        )


def _curves(scores: Scores, count: int) -> list[list[float] | None]:
    return [None] * count if scores.curves is None else scores.curves.float().tolist()


def clock(where: Tensor) -> float:
    """Seconds, after the device of a tensor has done what it was given."""
    if where.is_cuda:
        torch.cuda.synchronize(where.device)
    return time.perf_counter()
