"""From a batch of images to rows and evidence: maps of a method, scores of a metric, and where evidence lies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit._internal.environment import synchronized_time
from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.observation import find_patch_side, observe
from dave_vit.engine.targets import Contrast
from dave_vit.errors import DaveError, UnsupportedOperator
from dave_vit.evaluate.plan_entries import MethodEntry, Smoothing
from dave_vit.evaluate.statistics.rows import Row
from dave_vit.evaluate.store import reading
from dave_vit.maps import collapse, official_postprocess, smooth, to_patches
from dave_vit.methods import Method, create_method
from dave_vit.methods.cams import features
from dave_vit.methods.options import filter_options
from dave_vit.metrics import Case, Metric
from dave_vit.metrics.base import NO_MASS, NOT_FINITE
from dave_vit.models import traits_of

KnownMaps = list[tuple[list[Tensor], Tensor]]
"""Weights, inputs and targets, with their maps."""
_DEFAULT_TOKENS = 14  # along a side, for models whose patch size is not known


class MapMaker:
    """Computes the maps of a method of the plan, with its options, seed and smoothing.

    Args:
        entry: the method.
        smoothing: smoothing of the maps.
        seed: seed of methods that draw samples.
        known: maps that were computed before, for a metric that is in the plan with two smoothings.
    """

    def __init__(self, entry: MethodEntry, smoothing: Smoothing, seed: int, known: KnownMaps | None = None) -> None:
        self.entry, self.smoothing, self.seed, self.known = entry, smoothing, seed, known
        self.options = filter_options(entry.method, seed=seed) | dict(entry.options)
        self._method: Method | None = None  # for the last model; it may keep what it has drawn

    def maps(self, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """Return smoothed maps ``[B, H, W]`` of targets ``[B]``, or ``[B, K, H, W]`` of targets ``[B, K]``."""
        return self.smooth(model, self._find_or_compute(model, inputs, target))

    def _find_or_compute(self, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """Return the maps before smoothing; known ones for the same weights, inputs and targets."""
        if self.known is None:
            return self.raw(model, inputs, target)
        key = [_fingerprint(model), inputs, target]
        for known, maps in self.known:
            if all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(known, key, strict=True)):
                return maps
        self.known.append((key, self.raw(model, inputs, target)))
        return self.known[-1][1]

    def raw(self, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """Return the maps before smoothing, ``[B, H, W]`` or ``[B, K, H, W]``."""
        if self._method is None or self._method.model is not model:
            self._method = create_method(self.entry.method, model, **self.options)
        contrast = target if self.entry.against is None else Contrast(target, self.entry.against)
        maps = collapse(self._method.attribute(inputs, contrast).detach().flatten(0, -4))  # [B * K,H,W]
        return maps.view(*target.shape, *maps.shape[1:])

    def smooth(self, model: nn.Module, raw: Tensor) -> Tensor:
        """Return raw maps as they are scored, in the same shape."""
        maps, smoothing = raw.flatten(0, -3), self.smoothing
        if smoothing.kind == "official":
            return official_postprocess(maps).view_as(raw)
        if smoothing.kind == "patch":
            patch = traits_of(model).patch or find_patch_side(model) or max(1, raw.shape[-1] // _DEFAULT_TOKENS)
            return to_patches(maps, patch).view_as(raw)
        return smooth(maps, smoothing.kind, smoothing.size, smoothing.sigma).view_as(raw)


def _fingerprint(model: nn.Module) -> Tensor:
    """Return sums over the weights, which differ where a metric has randomised some, ``[tensors, 2]``."""
    parts = [part.to(precise_dtype(part.device)) for part in model.state_dict().values() if part.is_floating_point()]
    return torch.stack([torch.stack([part.sum(), part.square().sum()]) for part in parts]) if parts else torch.empty(0)


@dataclass(frozen=True)
class Scorer:
    """Computes the rows of a metric of the plan.

    Attributes:
        label: name of the metric in results.
        metric: the metric.
        options: hash of all options that decide its values for one method.
        smoothing: smoothing of the maps that it scores.
    """

    label: str
    metric: Metric
    options: str
    smoothing: Smoothing

    def count_images(self, positions: Sequence[int]) -> int:
        """Count the images or grids that the metric is scored on, given their rising positions in the run."""
        limit = self.metric.images
        return len(positions) if limit is None else sum(position < limit for position in positions)

    def score(self, case: Case, maps: Sequence[Row]) -> list[Row]:
        """Return the rows of a batch; an error of the metric is a reason in its rows, never the end of the run.

        An empty map has the worst value of the metric, and the reason beside it.

        Args:
            case: the maps and what the metric needs besides them.
            maps: the incomplete row of each map.
        """
        started = synchronized_time(case.inputs.device)
        try:
            scores = self.metric.score(case)
        except DaveError as error:
            return self.drop(maps, str(error))
        seconds = (synchronized_time(case.inputs.device) - started) / len(maps)
        curves = None if scores.curves is None else scores.curves.float().tolist()
        rows = []
        for i, (one, value) in enumerate(zip(maps, scores.values.flatten().double().tolist(), strict=True)):
            if math.isnan(value):
                (row,) = self.drop([one], self.metric.reason(case, i))
                row = replace(row, value=self.metric.worst) if row.dropped in (NO_MASS, NOT_FINITE) else row
            else:
                row = replace(one, value=value, metric=self.label, options=self.options)
                row = replace(row, curve=curves[i], at=list(scores.at)) if curves else row
            rows.append(replace(row, seconds=seconds))
        return rows

    def drop(self, maps: Sequence[Row], reason: str) -> list[Row]:
        """Return rows without a value."""
        return [replace(one, metric=self.label, options=self.options, dropped=" ".join(reason.split())) for one in maps]


CELL = 8  # pixels along a side


@dataclass(frozen=True)
class ImageEvidence:
    """Evidence of n images.

    Attributes:
        index: indices in the data set, ``[n]``.
        target: explained classes, ``[n]``.
        cells: shares of the positive evidence in cells of the input, ``[n, h, w]``; zero where a map has none.
        features: mean of the model's features, weighted by the evidence, ``[n, D]``.
        object_share: share of the evidence on the label's object, ``[n]``; NaN where the object is unknown.
    """

    index: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    cells: npt.NDArray[np.float32]
    features: npt.NDArray[np.float32]
    object_share: npt.NDArray[np.float32]


def compute_evidence(model: nn.Module, inputs: Tensor, maps: Tensor, regions: Tensor) -> dict[str, Any]:
    """Return cells, features and object shares of a batch, as in `ImageEvidence`.

    Args:
        model: the explained model.
        inputs: ``[B, C, H, W]``.
        maps: ``[B, H, W]``; their positive part is the evidence.
        regions: True at the label's objects, ``[B, H, W]``.
    """
    positive = maps.float().nan_to_num().clamp(min=0)
    positive = positive / positive.sum((1, 2)).clamp(min=torch.finfo(torch.float32).tiny)[:, None, None]
    size = (max(1, positive.shape[1] // CELL), max(1, positive.shape[2] // CELL))
    cells = F.adaptive_avg_pool2d(positive, size)
    cells = cells / cells.sum((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    share = torch.where(regions.any(2).any(1), (positive * regions).sum((1, 2)), torch.nan)
    arrays = {"cells": cells, "features": _pool_features(model, inputs, positive), "object_share": share}
    return {name: array.detach().float().cpu().numpy() for name, array in arrays.items()}


def _pool_features(model: nn.Module, inputs: Tensor, positive: Tensor) -> Tensor:
    """Return means ``[B, D]`` of the model's features, weighted by evidence ``[B, H, W]``; colours if it has none."""
    try:
        with observe(model, inputs) as observed:
            source, to_grid = features(observed, inputs)
            grid = to_grid(source.detach()).float()  # [B, D, h, w]
    except UnsupportedOperator:
        grid = inputs.float()
    weights = F.adaptive_avg_pool2d(positive, (grid.shape[2], grid.shape[3]))[:, None]
    return (grid * weights).sum((2, 3)) / weights.sum((2, 3)).clamp(min=torch.finfo(torch.float32).tiny)


def read_evidence(paths: Sequence[Path]) -> ImageEvidence:
    """Join the files of tasks; raise `DamagedFile` for one that cannot be read."""
    parts = []
    for path in paths:
        with reading(path), np.load(path) as arrays:
            parts.append([arrays[field.name] for field in fields(ImageEvidence)])
    return ImageEvidence(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
