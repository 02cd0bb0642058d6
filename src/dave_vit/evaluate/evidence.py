"""Evidence of images: where the evidence for a class lies, and which features the model has there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.engine.observation import observe
from dave_vit.errors import UnsupportedOperator, first_line
from dave_vit.evaluate.store import DamagedFile
from dave_vit.methods.cams import features

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
    total = positive.sum((1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
    positive = positive / total[:, None, None]
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
        try:
            with np.load(path) as arrays:
                parts.append([arrays[field.name] for field in fields(ImageEvidence)])
        except Exception as error:  # whatever the bytes are
            raise DamagedFile(path, first_line(error)) from error
    return ImageEvidence(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
