"""What all workers of a run share: the job, and a model with what its preprocessing does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.data import Dataset
from dave_vit.data.classes import map_classes
from dave_vit.data.geometry import GeometryCache
from dave_vit.errors import OptionError, UnsupportedOperator
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import ModelEntry
from dave_vit.evaluate.provenance import model_digest
from dave_vit.methods import create_method

Loader = Callable[[ModelEntry, str], nn.Module]


@dataclass(frozen=True)
class EvalJob:
    """What all workers of a run share; it travels to other processes.

    Attributes:
        plan: what is computed.
        loader: from an entry of the plan and a device to a model.
        threads: of torch in each worker on the CPU; the sums of some operations depend on it.
        made_with: software and weights that workers must have; anything goes where nothing is said.
    """

    plan: Plan
    loader: Loader = ModelEntry.load
    threads: int | None = None
    made_with: Mapping[str, Mapping[str, str]] | None = None

    def load(self, entry: ModelEntry, device: str) -> nn.Module:
        """A model, if its weights are those of the run."""
        model = self.loader(entry, device)
        self.compare("models", entry.label, model_digest(model) if self.made_with else "")
        return model

    def compare(self, kind: str, name: str, found: str) -> None:
        """Refuses what the run was not begun with."""
        wanted = self.made_with[kind].get(name, found) if self.made_with else found
        if wanted != found:
            where = "a worker loads other weights" if kind == "models" else "a worker has another version"
            said = f"{where} of {name} than the run was begun with ({found} instead of {wanted})"
            raise OptionError(f"{said}; use the same ones everywhere, or go on with --allow-mixed")


class EvaluatedModel:
    """A model, and what its preprocessing does to classes, places and colours.

    Args:
        model: has ``preprocess`` and ``class_names``, as ``load_model`` gives it.
        data: what it is evaluated on.
    """

    def __init__(self, model: Any, data: Dataset) -> None:
        self.model: nn.Module = model
        self.geometries = GeometryCache(model.preprocess)
        self.classes = map_classes(data.class_names, model.class_names)
        self.black, self.white = (self._colour(grey) for grey in (0, 255))

    def label(self, label: int | None) -> int | None:
        """A label of the data set as a class of the model."""
        return None if label is None else self.classes.get(label)

    def picture(self, inputs: Tensor) -> npt.NDArray[np.uint8]:
        """Preprocessed images as the model sees them, [B,H,W,3]."""
        black, white = (torch.tensor(colour[:3]).view(1, 3, 1, 1) for colour in (self.black, self.white))
        shown = (inputs[:, :3].detach().float().cpu() - black) / (white - black)
        return np.asarray((shown.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy())

    def _colour(self, grey: int) -> list[float]:
        """A black or white pixel after preprocessing, one number per channel."""
        shown = self.geometries.preprocess(Image.new("RGB", (64, 64), (grey, grey, grey)))
        shown = shown.reshape(shown.shape[-3:]).float()  # [C,H,W]
        centre: list[float] = shown[:, shown.shape[1] // 2, shown.shape[2] // 2].tolist()
        return centre


def check(job: EvalJob, data: Dataset) -> dict[str, str]:
    """Loads each model of a plan and makes each method for it once, so that what cannot work is said at once.

    Returns:
        A hash of the weights of each model, by its label.
    """
    digests = {}
    for entry in job.plan.models:
        subject = EvaluatedModel(job.loader(entry, "cpu"), data)
        digests[entry.label] = model_digest(subject.model)
        for method in job.plan.methods:
            with suppress(UnsupportedOperator):  # its images are dropped, with the reason
                create_method(method.method, subject.model, **method.options)
    return digests
