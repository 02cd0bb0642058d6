"""What rows are computed with: the code, the libraries and the weights of the models, by content."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import torch
from torch import nn

from dave_vit._internal.environment import versions

_DISPLAY = ("cli", "viz", "web")  # packages that no number depends on


@cache
def software_versions() -> dict[str, str]:
    """Return the versions of the libraries, and a hash of this package's own code."""
    code = hashlib.sha256()
    for folder in sorted(resources.files("dave_vit").iterdir(), key=lambda path: path.name):
        if folder.name not in _DISPLAY:
            _update_hash(code, folder)
    return {**versions(), "code": code.hexdigest()[:12]}


def _update_hash(code: Any, path: Traversable) -> None:
    """Add a file of code or settings to a hash, or all those of a folder."""
    if path.is_dir():
        for inner in sorted(path.iterdir(), key=lambda one: one.name):
            _update_hash(code, inner)
    elif path.name.endswith((".py", ".toml")):
        code.update(path.name.encode() + b"\0" + path.read_bytes())


def hash_weights(model: nn.Module) -> str:
    """Return a hash of all parameters and buffers: weights on a hub may change under the same name."""
    weights = hashlib.sha256()
    for name, value in model.state_dict().items():
        weights.update(f"{name} {getattr(value, 'dtype', '')} {list(getattr(value, 'shape', ()))}".encode())
        if isinstance(value, torch.Tensor):
            weights.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return weights.hexdigest()[:12]
