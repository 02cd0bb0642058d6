"""What all workers of a run share: the job, a loaded model, and the versions and weights that rows depend on."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit._internal.content_hash import PACKAGE, hash_code, hash_file
from dave_vit._internal.environment import versions
from dave_vit.data import Dataset
from dave_vit.data.classes import map_classes
from dave_vit.data.geometry import GeometryCache
from dave_vit.errors import OptionError, UnsupportedOperator
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import ModelEntry
from dave_vit.methods import create_method

# Files that no row depends on: what runs tasks, summarises rows and shows results.
_NOT_IN_ROWS = (
    *("analysis", "audit", "cli", "explanations", "viz", "web", "evaluate/dispatch.py", "evaluate/engines"),
    *(f"evaluate/{name}.py" for name in ("report", "run", "store")),
    *(f"evaluate/statistics/{name}.py" for name in ("intervals", "scores", "summary")),
)


@cache
def software_versions() -> dict[str, str]:
    """Return the versions of the libraries, and a hash of this package's own code."""
    code = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.*")):
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix in (".py", ".toml") and not name.startswith(_NOT_IN_ROWS):
            code.update(f"{name} {hash_code(path) if path.suffix == '.py' else hash_file(path)}".encode())
    return {**versions(), "code": code.hexdigest()[:12]}


def hash_weights(model: nn.Module) -> str:
    """Return a hash of all parameters and buffers: weights on a hub may change under the same name."""
    weights = hashlib.sha256()
    for name, value in model.state_dict().items():
        weights.update(f"{name} {getattr(value, 'dtype', '')} {list(getattr(value, 'shape', ()))}".encode())
        if isinstance(value, torch.Tensor):
            weights.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return weights.hexdigest()[:12]


ModelLoader = Callable[[ModelEntry, str], nn.Module]


@dataclass(frozen=True)
class EvalJob:
    """What all workers of a run share; it is sent to other processes.

    Attributes:
        plan: what is computed.
        loader: returns the model of an entry of the plan on a device.
        threads: torch threads of each worker on the CPU; the sums of some operations depend on it.
        provenance: software and weights that workers must have; not checked if None.
    """

    plan: Plan
    loader: ModelLoader = ModelEntry.load
    threads: int | None = None
    provenance: Mapping[str, Mapping[str, str]] | None = None

    def load(self, entry: ModelEntry, device: str) -> nn.Module:
        """Load a model and check that its weights are those of the run."""
        model = self.loader(entry, device)
        if self.provenance is not None:
            self.check_provenance("models", entry.label, hash_weights(model))
        return model

    def check_provenance(self, kind: str, name: str, value: str) -> None:
        """Raise an error if a library or a model is not the one that the run was started with."""
        expected = self.provenance[kind].get(name, value) if self.provenance else value
        if expected != value:
            what = "a worker loads other weights" if kind == "models" else "a worker has another version"
            both = f"{what} of {name} than the run was started with ({value} instead of {expected})"
            raise OptionError(f"{both}; use the same ones everywhere, or continue with --allow-mixed")


class EvaluatedModel:
    """A model, and what its preprocessing does to classes, positions and colours.

    Args:
        model: has ``preprocess`` and ``class_names``, as ``load_model`` returns it.
        data: what it is evaluated on.
    """

    def __init__(self, model: Any, data: Dataset) -> None:
        self.model: nn.Module = model
        self.geometries = GeometryCache(model.preprocess)
        self.classes = map_classes(data.class_names, model.class_names)
        self.black, self.white = (self._preprocess_grey(grey) for grey in (0, 255))

    def to_pixels(self, inputs: Tensor) -> npt.NDArray[np.uint8]:
        """Return preprocessed images ``[B, C, H, W]`` as the model sees them, ``[B, H, W, 3]``."""
        black, white = (torch.tensor(colour[:3]).view(1, 3, 1, 1) for colour in (self.black, self.white))
        pixels = (inputs[:, :3].detach().float().cpu() - black) / (white - black)
        return np.asarray((pixels.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy())

    def _preprocess_grey(self, grey: int) -> list[float]:
        """Return a grey pixel after preprocessing, one number per channel."""
        inputs = self.geometries.preprocess(Image.new("RGB", (64, 64), (grey, grey, grey)))
        inputs = inputs.reshape(inputs.shape[-3:]).float()  # [C,H,W]
        return inputs[:, inputs.shape[1] // 2, inputs.shape[2] // 2].tolist()  # type: ignore[no-any-return]


def check_models(job: EvalJob, data: Dataset) -> dict[str, str]:
    """Load each model of a plan and create each method for it once, so that errors come before the run starts.

    Returns:
        A hash of the weights of each model by its label.
    """
    digests = {}
    for entry in job.plan.models:
        model = EvaluatedModel(job.loader(entry, "cpu"), data).model
        digests[entry.label] = hash_weights(model)
        for method in job.plan.methods:
            with suppress(UnsupportedOperator):  # its images are dropped, with the reason
                create_method(method.method, model, **method.options)
    return digests
