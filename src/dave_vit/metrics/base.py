"""What every metric is: a batch of maps in, one number per map out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from dave_vit.errors import OptionError
from dave_vit.registry import Registry

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


class Metric(ABC):
    """Base of all metrics.

    Attributes:
        summary: one sentence.
        axis: what the horizontal axis of its curves is, where it has curves.
        grids: whether it scores grids of images instead of images.
        higher_is_better: which direction is good.
        images: how many images of a data set it is scored on; all where nothing is said.
    """

    summary: ClassVar[str]
    axis: ClassVar[str] = ""
    grids: ClassVar[bool] = False
    higher_is_better: bool = True
    images: int | None = None

    @abstractmethod
    def score(self, case: Case) -> Scores:
        """The score of each map."""

    def reason(self, case: Case, index: int) -> str:
        """Why map ``index`` of a case has no score; the maps of a grid follow one another."""
        finite = case.maps.flatten(0, -3)[index].isfinite().all()
        return "no positive mass" if finite else "map is not finite"


METRICS: Registry[type[Metric]] = Registry("metric")


def create_metric(name: str, **options: Any) -> Metric:
    """A metric by its name.

    Args:
        name: one of ``METRICS``.
        options: the metric's own options.
    """
    try:
        return METRICS[name](**options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise OptionError(f"metric {name!r}: {str(error).split('() ')[-1]}") from error
