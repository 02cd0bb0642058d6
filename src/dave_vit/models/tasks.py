"""Transformers models for tasks other than classification; a score reads a number out of their output object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from dave_vit.engine.scores import Query, Region, Value, select_embeddings
from dave_vit.engine.targets import Score
from dave_vit.models.adapter import Adapter

NamedScore = tuple[str, Score]
"""A score, and its name as `--score` takes it."""


@dataclass(frozen=True)
class TaskKind:
    """A task that models are trained for.

    Attributes:
        name: one word, such as "detection".
        auto_class: the class of transformers that loads such models.
        check_score: the score that `dave doctor` checks.
        default_score: what `dave explain` explains by default: a score, "boxes" for all detections, or None where the
            user must choose a score.
        advice: what to do where the user must choose a score.
    """

    name: str
    auto_class: str
    check_score: Score
    default_score: NamedScore | Literal["boxes"] | None = None
    advice: str = "give what to explain, such as --score query:3:CLASS"


def average_embedding(output: Any) -> Tensor:
    """Return the mean of each picture's embedding, ``[B]``."""
    return select_embeddings(output).mean(1)


EMBEDDING = TaskKind(
    "embedding",
    "AutoModel",
    average_embedding,
    advice="compare it with another picture, --score similarity:FILE, or train a head with `dave probe`",
)
"""Backbones without a head."""


TASKS = {
    "ForObjectDetection": TaskKind("detection", "AutoModelForObjectDetection", Query(0, 0), "boxes"),
    "ForSemanticSegmentation": TaskKind(
        "segmentation", "AutoModelForSemanticSegmentation", Region(0, box=(0.0, 0.0, 1.0, 1.0))
    ),
    "ForUniversalSegmentation": TaskKind("segmentation", "AutoModelForUniversalSegmentation", Query(0, 0)),
    "ForInstanceSegmentation": TaskKind("segmentation", "AutoModelForUniversalSegmentation", Query(0, 0)),
    "ForDepthEstimation": TaskKind("depth", "AutoModelForDepthEstimation", Value(), ("value", Value())),
}
"""Tasks by the suffix of the architecture's name."""


def find_task(config: Any) -> TaskKind | None:
    """Return the task of the architecture that a configuration names; None for classifiers and unknown ones."""
    names = getattr(config, "architectures", None) or ()
    return next((task for suffix, task in TASKS.items() if any(name.endswith(suffix) for name in names)), None)


class TaskModel(Adapter):
    """A detector, a segmentation or a depth model; it returns the model's own output object.

    Args:
        args: as of `Adapter`.
        task: what the model is trained for.
        options: as of `Adapter`.
    """

    def __init__(self, *args: Any, task: TaskKind, **options: Any) -> None:
        super().__init__(*args, **options)
        self.task = task

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's output object."""
        return self.model(inputs)
