"""What rows are computed with: the code, the libraries and the weights of the models, by content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import torch
from torch import nn

from dave_vit._internal.environment import versions

_SHOWING = ("cli", "report", "viz", "web")  # rooms that no number depends on


@cache
def software() -> dict[str, str]:
    """Versions of the libraries, and a hash of this package's own code."""
    return {**versions(), "code": _code_digest()}


@cache
def _code_digest() -> str:
    known = hashlib.sha256()
    for folder in sorted(resources.files("dave_vit").iterdir(), key=lambda path: path.name):
        if folder.name not in _SHOWING:
            _add(known, folder)
    return known.hexdigest()[:12]


def _add(known: Any, path: Traversable) -> None:
    """Takes up a file of code or settings, or all those of a folder."""
    if path.is_dir():
        for inner in sorted(path.iterdir(), key=lambda one: one.name):
            _add(known, inner)
    elif path.name.endswith((".py", ".toml")):
        known.update(path.name.encode() + b"\0" + path.read_bytes())


def model_digest(model: nn.Module) -> str:
    """A hash of all parameters and buffers: weights of a hub may change under the same name."""
    known = hashlib.sha256()
    for name, value in model.state_dict().items():
        known.update(f"{name} {getattr(value, 'dtype', '')} {list(getattr(value, 'shape', ()))}".encode())
        if isinstance(value, torch.Tensor):
            known.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return known.hexdigest()[:12]


def provenance(models: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Of a run now: the software, and the weights of each model by its label."""
    return {"software": software(), "models": dict(models)}
