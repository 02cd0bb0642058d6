"""What every metric is: a batch of maps in, one number per map out."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from torch import Tensor, nn

from dave_vit._internal.registry import Registry
from dave_vit._internal.schema import check_values
from dave_vit.data.grids import Cell, GridOptions

Explain = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Model, inputs [B,C,H,W] and target [B] to maps [B,H,W]."""


@dataclass(frozen=True)
class Case:
    """A batch of maps, and all that a metric may look at beside them.

    Attributes:
        model: maps inputs to logits.
        inputs: preprocessed images [B,C,H,W].
        target: the explained classes, [B]; [B,K] for grids.
        maps: [B,H,W]; [B,K,H,W] for grids.
        regions: [B,H,W], true where the target's objects are.
        explain: makes maps of other inputs or of another model in the way in which these were made.
        black: the preprocessed value of a black pixel, one number per channel.
    """

    model: nn.Module
    inputs: Tensor
    target: Tensor
    maps: Tensor
    regions: Tensor
    explain: Explain
    black: Sequence[float] | None = None


@dataclass(frozen=True)
class Scores:
    """The outcome for a batch.

    Attributes:
        values: one number per map, shaped as the targets; NaN where there is nothing to score.
        curves: what the numbers sum up, [B,steps].
        at: where on the horizontal axis the steps are.
    """

    values: Tensor
    curves: Tensor | None = None
    at: Sequence[float] = ()


NO_MASS, NOT_FINITE = "no positive mass", "map is not finite"


class Metric(ABC):
    """Base of all metrics.

    Attributes:
        summary: one sentence.
        axis: what the horizontal axis of its curves is, where it has curves.
        higher_is_better: which direction is good.
        worst: what a map scores that shows nothing, having no positive mass or values that are not finite; such maps
            are left out where nothing is said.
        images: how many images of a data set it is scored on; all where nothing is said.
    """

    summary: ClassVar[str]
    axis: ClassVar[str] = ""
    higher_is_better: bool = True
    worst: ClassVar[float | None] = None
    images: int | None = None

    @abstractmethod
    def score(self, case: Case) -> Scores:
        """The score of each map."""

    def reason(self, case: Case, index: int) -> str:
        """Why map ``index`` of a case has no score; the maps of a grid follow one another."""
        finite = case.maps.flatten(0, -3)[index].isfinite().all()
        return NO_MASS if finite else NOT_FINITE


class GridMetric(Metric):
    """Base of metrics of grids: pictures of images of distinct classes, with a map for each class.

    All metrics of grids of a run are scored on the same grids and the same maps. They get maps [B,K,H,W] of targets
    [B,K], the cells in reading order, and give one number per cell.

    Args:
        grids: how many are built; no more than images that the model knows well enough.
        cells: along a side, 2 or 3.
        confidence: softmax probability of its label that an image must exceed to enter a grid; where nothing is said,
            0.95, or less for a model that is hardly ever so sure.
        cell: "resize" for grids as large as one image, "full" for models that take larger ones.
        seed: of the draw of the classes.
    """

    def __init__(
        self, grids: int = 500, cells: int = 2, confidence: float | None = None, cell: Cell = "resize", seed: int = 0
    ) -> None:
        self.fixed = confidence is not None
        self.options = GridOptions(grids, cells, 0.95 if confidence is None else confidence, cell, seed)


METRICS: Registry[type[Metric]] = Registry("metric")


def create_metric(name: str, **options: Any) -> Metric:
    """A metric by its name.

    Args:
        name: one of ``METRICS``.
        options: the metric's own options.
    """
    kind = METRICS[name]
    hints = get_type_hints(kind.__init__)
    check_values(options, {one: hints.get(one, Any) for one in inspect.signature(kind).parameters}, f"metric {name!r}")
    return kind(**options)
