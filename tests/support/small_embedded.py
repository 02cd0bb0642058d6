"""The embedded models in small: for whole commands on builtin data that are not asked what they find in the pictures.

As large as they are, they take most of the time of a test that looks at files, kills and resumed runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from dave_vit.data import open_dataset
from dave_vit.data.builtin import CLASS_NAMES
from dave_vit.models import Adapter
from dave_vit.models.families import builtin

KNOWN = 24  # pictures of the benchmark that they know by heart, the first ones
_SIZE = 64


def shrink(folder: str | Path, put: Callable[[object, str, object], None] = setattr) -> None:
    """In this process the embedded models are small ones from now on, with the weights in a folder.

    Args:
        folder: of the weights.
        put: sets an attribute, such as one that is set back later.
    """
    small = {"dim": 64, "depth": 2, "heads": 2, "size": _SIZE}
    entries = {
        name: replace(made, create=partial(made.create.func, len(CLASS_NAMES), **small))
        for name, made in builtin.BUILTIN.data.items()
    }
    put(builtin, "SIZE", _SIZE)
    put(builtin, "_WEIGHTS", Path(folder))
    put(builtin.BUILTIN, "data", entries)


def write_weights(folder: Path, names: Iterable[str] = builtin.BUILTIN) -> None:
    """The weights for ``shrink``, which comes before, of all models or of some."""
    data = open_dataset("builtin", KNOWN)
    pictures = [data.image(number) for number in range(KNOWN)]
    labels = torch.tensor([data[number].label for number in range(KNOWN)])
    for name in names:
        torch.manual_seed(0)
        model = builtin.load(name, "random")
        _learn(model, torch.cat([model.preprocess(picture) for picture in pictures]), labels)
        save_file(model.model.state_dict(), folder / f"{name}.safetensors")


def _learn(model: Adapter, inputs: Tensor, labels: Tensor) -> None:
    """Until it is sure of every picture, and more than sure enough for grids."""
    for norm in [module for module in model.modules() if isinstance(module, nn.LayerNorm)][-1:]:
        nn.init.constant_(norm.weight, 4.0)  # what a B-cos head says is not larger than what enters it
    optimiser = torch.optim.Adam(model.model.requires_grad_().parameters(), lr=0.01)
    for _ in range(80):
        optimiser.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
