"""From a batch of images to rows: the maps of a method, and the scores of a metric."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dave_vit.bench.numbers.rows import Row
from dave_vit.bench.plan import MethodEntry, Smoothing
from dave_vit.errors import DaveError
from dave_vit.maps import collapse, official_postprocess, smooth
from dave_vit.methods import create_method
from dave_vit.metrics import Case, Metric
from dave_vit.targets import Contrast


class MapMaker:
    """A method of the plan with its options and seed, and the smoothing of the run.

    Args:
        entry: of the plan.
        smoothing: of the plan.
        seed: for methods that draw samples.
    """

    def __init__(self, entry: MethodEntry, smoothing: Smoothing, seed: int) -> None:
        self.entry, self.smoothing = entry, smoothing
        self.options = {**({"seed": seed} if entry.seeded else {}), **entry.options}

    def maps(self, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """Maps [B,H,W] of targets [B], or [B,K,H,W] of targets [B,K]."""
        method = create_method(self.entry.method, model, **self.options)
        wanted = target if self.entry.against is None else Contrast(target, self.entry.against)
        attribution = method.attribute(inputs, wanted).detach()
        maps = self._smooth(collapse(attribution.flatten(0, -4)))  # [B * K,H,W]
        return maps.view(*target.shape, *maps.shape[1:])

    def _smooth(self, maps: Tensor) -> Tensor:
        if self.smoothing.kind == "official":
            return official_postprocess(maps)
        return smooth(maps, self.smoothing.kind, self.smoothing.size, self.smoothing.sigma)


@dataclass(frozen=True)
class Scorer:
    """A metric of the plan.

    Attributes:
        label: how results call it.
        metric: itself.
        options: hash of all options that decide its values for one method.
    """

    label: str
    metric: Metric
    options: str

    def rows(self, case: Case, maps: Sequence[Row]) -> list[Row]:
        """The rows of a batch; what the metric cannot do with this model is a reason, never the end of the run.

        Args:
            case: the maps, and what the metric looks at beside them.
            maps: what is known of each map.
        """
        started = clock(case.inputs)
        try:
            scores = self.metric.score(case)
        except DaveError as error:
            return self.dropped(maps, str(error))
        seconds = (clock(case.inputs) - started) / len(maps)
        curves = None if scores.curves is None else scores.curves.float().tolist()
        made = []
        for i, (one, value) in enumerate(zip(maps, scores.values.flatten().double().tolist(), strict=True)):
            if math.isnan(value):
                (row,) = self.dropped([one], self.metric.reason(case, i))
            else:
                row = replace(one, value=value, metric=self.label, options=self.options)
                row = replace(row, curve=curves[i], at=list(scores.at)) if curves else row
            made.append(replace(row, seconds=seconds))
        return made

    def dropped(self, maps: Sequence[Row], reason: str) -> list[Row]:
        """Rows without a value."""
        words = " ".join(reason.split())
        return [replace(one, metric=self.label, options=self.options, dropped=words) for one in maps]


def clock(where: Tensor) -> float:
    """Seconds, after the device of a tensor has done what it was given."""
    if where.is_cuda:
        torch.cuda.synchronize(where.device)
    return time.perf_counter()
