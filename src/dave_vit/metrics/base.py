"""Base classes of metrics, and their registry. A metric turns a batch of maps into one number per map."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor, nn

from dave_vit._internal.registry import Registry
from dave_vit._internal.schema import check_annotations, check_values, declare_options, type_hints
from dave_vit.data.grids import Cell, GridOptions

Explain = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Function from a model, inputs [B,C,H,W] and targets [B] to maps [B,H,W]."""


@dataclass(frozen=True)
class Case:
    """A batch of maps with everything that a metric may use to score them.

    Attributes:
        model: maps inputs to logits.
        inputs: preprocessed images [B,C,H,W].
        target: explained classes, [B]; [B,K] for grids.
        maps: [B,H,W]; [B,K,H,W] for grids.
        regions: [B,H,W], true inside the target's objects.
        explain: computes maps of other inputs or of another model with the method and options of ``maps``.
        black: preprocessed value of a black pixel, one number per channel.
    """

    model: nn.Module
    inputs: Tensor
    target: Tensor
    maps: Tensor
    regions: Tensor
    explain: Explain
    black: Sequence[float] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the inputs."""
        return self.inputs.shape[2], self.inputs.shape[3]


@dataclass(frozen=True)
class Scores:
    """Scores of a batch of maps.

    Attributes:
        values: one number per map, shaped as the targets; NaN where a map cannot be scored.
        curves: the curves that the numbers summarise, [B,steps].
        at: positions of the steps on the horizontal axis.
    """

    values: Tensor
    curves: Tensor | None = None
    at: Sequence[float] = ()


NO_MASS, NOT_FINITE, CONSTANT = "no positive mass", "map is not finite", "map is constant"


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@declare_options
class Metric(ABC):
    """Base of all metrics. Annotated attributes of a subclass are its options.

    Attributes:
        summary: one sentence.
        axis: label of the horizontal axis of the curves, for metrics with curves.
        higher_is_better: whether a higher score is better.
        bounds: least and largest possible score, if there are any; intervals stay within them.
        worst: score of a map without positive mass or with values that are not finite; None drops such maps.
        unscored: reason given for a finite map without a score.
        images: number of images of the data set to score; None for all.
    """

    summary: ClassVar[str]
    axis: ClassVar[str] = ""
    higher_is_better: bool = field(default=True, init=False)
    bounds: ClassVar[tuple[float, float] | None] = None
    worst: ClassVar[float | None] = None
    unscored: ClassVar[str] = NO_MASS
    images: int | None = field(default=None, init=False)

    def __init_subclass__(cls) -> None:
        declare_options(cls)

    def __post_init__(self) -> None:
        check_annotations(self)

    @abstractmethod
    def score(self, case: Case) -> Scores:
        """Score each map of a case."""

    def reason(self, case: Case, index: int) -> str:
        """Return why map ``index`` has no score; maps of grids are counted over grids and cells."""
        return self.unscored if case.maps.flatten(0, -3)[index].isfinite().all() else NOT_FINITE


class GridMetric(Metric):
    """Base of metrics of grids: pictures composed of images of distinct classes, with a map for each class.

    All grid metrics of a run share the same grids and maps. They get maps [B,K,H,W] of targets [B,K], cells in reading
    order, and return one number per cell.

    Args:
        grids: number of grids; fewer if the model recognises too few images.
        cells: cells along a side, 2 or 3.
        confidence: softmax probability of its label above which an image may enter a grid; by default 0.95, or less for
            a model that is rarely so confident.
        cell: "resize" for grids of the size of one image, "full" for models that accept larger ones.
        seed: seed of the draw of the classes.
    """

    grids: int = 500
    cells: int = 2
    confidence: float | None = None
    cell: Cell = "resize"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fixed, confidence = (False, 0.95) if self.confidence is None else (True, self.confidence)
        self.options = GridOptions(self.grids, self.cells, confidence, self.cell, self.seed)


METRICS: Registry[type[Metric]] = Registry("metric")


def create_metric(name: str, **options: Any) -> Metric:
    """Create a metric by its name.

    Args:
        name: one of ``METRICS``.
        options: the metric's own options.
    """
    metric = METRICS[name]
    hints = type_hints(metric.__init__)
    known = {option: hints.get(option, Any) for option in signature(metric).parameters}
    check_values(options, known, f"metric {name!r}")
    return metric(**options)
