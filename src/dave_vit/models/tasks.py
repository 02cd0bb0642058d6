"""Models of transformers for other tasks than classification: their output is left as it is, for scores to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dave_vit.engine.scores import Query, Region, Value
from dave_vit.engine.targets import Score
from dave_vit.models.adapter import Adapter


@dataclass(frozen=True)
class Task:
    """What a kind of model does.

    Attributes:
        name: in one word.
        automatic: the class of transformers that makes such models.
        score: what is examined of one.
        usual: what is explained of a photograph where nothing else is asked for: a score by its name, "boxes" for all
            that is found, or None where there is no such thing.
    """

    name: str
    automatic: str
    score: Score
    usual: str | None = None


TASKS = {
    "ForObjectDetection": Task("detection", "AutoModelForObjectDetection", Query(0, 0), "boxes"),
    "ForSemanticSegmentation": Task(
        "segmentation", "AutoModelForSemanticSegmentation", Region(0, box=(0.0, 0.0, 1.0, 1.0))
    ),
    "ForUniversalSegmentation": Task("segmentation", "AutoModelForUniversalSegmentation", Query(0, 0)),
    "ForInstanceSegmentation": Task("segmentation", "AutoModelForUniversalSegmentation", Query(0, 0)),
    "ForDepthEstimation": Task("depth", "AutoModelForDepthEstimation", Value(), "value"),
}


def task_of(config: Any) -> Task | None:
    """By the architecture that a configuration names; None for classifiers and where nothing is said."""
    names = getattr(config, "architectures", None) or ()
    return next((task for end, task in TASKS.items() if any(name.endswith(end) for name in names)), None)


class TaskModel(Adapter):
    """A detector, a segmentation or a depth model, with its preprocessing and the names of its classes."""

    task: Task

    def forward(self, inputs: Tensor) -> Any:
        """The model's output object."""
        return self.model(inputs)
