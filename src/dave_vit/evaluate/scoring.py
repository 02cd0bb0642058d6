"""From a batch of images to rows: the maps of a method, and the scores of a metric."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.targets import Contrast
from dave_vit.engine.token_layout import find_patch_side
from dave_vit.errors import DaveError
from dave_vit.evaluate.plan_entries import MethodEntry, Smoothing
from dave_vit.evaluate.statistics.rows import Row
from dave_vit.maps import collapse, official_postprocess, smooth, to_patches
from dave_vit.methods import Method, create_method
from dave_vit.methods.options import filter_options
from dave_vit.metrics import Case, Metric
from dave_vit.metrics.base import NO_MASS, NOT_FINITE, Explain
from dave_vit.models import traits_of

_TOKENS = 14  # along a side, for models whose patches are not known


class MapMaker:
    """A method of the plan with its options and seed, and a smoothing.

    Args:
        entry: of the plan.
        smoothing: of the maps.
        seed: for methods that draw samples.
        recall: maps that were made already, where some are asked for again.
    """

    def __init__(self, entry: MethodEntry, smoothing: Smoothing, seed: int, recall: MapCache | None = None) -> None:
        self.entry, self.smoothing, self.seed, self.recall = entry, smoothing, seed, recall
        self.options = filter_options(entry.method, seed=seed) | dict(entry.options)
        self._method: Method | None = None  # of the last model; it may hold what it has drawn

    def maps(self, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """Maps [B,H,W] of targets [B], or [B,K,H,W] of targets [B,K]."""
        if self.recall is None:
            return self.smoothed(model, self.raw(model, inputs, target))
        return self.smoothed(model, self.recall.maps(self.raw, model, inputs, target))

    def raw(self, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """The same before they are smoothed."""
        if self._method is None or self._method.model is not model:
            self._method = create_method(self.entry.method, model, **self.options)
        wanted = target if self.entry.against is None else Contrast(target, self.entry.against)
        attribution = self._method.attribute(inputs, wanted).detach()
        maps = collapse(attribution.flatten(0, -4))  # [B * K,H,W]
        return maps.view(*target.shape, *maps.shape[1:])

    def smoothed(self, model: nn.Module, raw: Tensor) -> Tensor:
        """Maps of ``raw`` as they are scored."""
        maps, how = raw.flatten(0, -3), self.smoothing
        if how.kind == "official":
            return official_postprocess(maps).view_as(raw)
        if how.kind == "patch":
            patch = traits_of(model).patch or find_patch_side(model) or max(1, raw.shape[-1] // _TOKENS)
            return to_patches(maps, patch).view_as(raw)
        return smooth(maps, how.kind, how.size, how.sigma).view_as(raw)

    def with_smoothing(self, smoothing: Smoothing, recall: MapCache | None = None) -> MapMaker:
        """The same method with another smoothing."""
        return MapMaker(self.entry, smoothing, self.seed, recall)


class MapCache:
    """Maps that metrics ask for beside those that they score; once for a metric that is there with two smoothings."""

    def __init__(self) -> None:
        self._made: list[tuple[list[Tensor], Tensor]] = []

    def maps(self, make: Explain, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """What ``make`` gives, made once for the same weights, inputs and targets."""
        asked = [_weights(model), inputs, target]
        for known, maps in self._made:
            if all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(known, asked, strict=True)):
                return maps
        self._made.append((asked, make(model, inputs, target)))
        return self._made[-1][1]


def _weights(model: nn.Module) -> Tensor:
    """A few numbers that tell weights from others: metrics draw some anew, and so do again."""
    parts = [part.to(precise_dtype(part.device)) for part in model.state_dict().values() if part.is_floating_point()]
    return torch.stack([torch.stack([part.sum(), part.square().sum()]) for part in parts]) if parts else torch.empty(0)


@dataclass(frozen=True)
class Scorer:
    """A metric of the plan.

    Attributes:
        label: how results call it.
        metric: itself.
        options: hash of all options that decide its values for one method.
        smoothing: of the maps that it scores.
    """

    label: str
    metric: Metric
    options: str
    smoothing: Smoothing

    def count(self, places: Sequence[int]) -> int:
        """How many of the images or grids at these places, which rise, it is scored on."""
        limit = self.metric.images
        return len(places) if limit is None else sum(place < limit for place in places)

    def rows(self, case: Case, maps: Sequence[Row]) -> list[Row]:
        """The rows of a batch; what the metric cannot do with this model is a reason, never the end of the run.

        A map that shows nothing has the worst value that the metric knows, and the reason beside it.

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
                row = replace(row, value=self.metric.worst) if row.dropped in (NO_MASS, NOT_FINITE) else row
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
