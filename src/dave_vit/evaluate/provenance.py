"""What rows are computed with: the code, the libraries and the weights of the models, by content."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch import nn

from dave_vit._internal.environment import versions

_PACKAGE = Path(__file__).parents[1]
_DISPLAY = ("cli", "viz", "web")  # packages that no number depends on


@cache
def software_versions() -> dict[str, str]:
    """Return the versions of the libraries, and a hash of this package's own code."""
    code = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.*")):
        if path.suffix in (".py", ".toml") and path.relative_to(_PACKAGE).parts[0] not in _DISPLAY:
            code.update(path.name.encode() + b"\0" + path.read_bytes())
    return {**versions(), "code": code.hexdigest()[:12]}


def hash_weights(model: nn.Module) -> str:
    """Return a hash of all parameters and buffers: weights on a hub may change under the same name."""
    weights = hashlib.sha256()
    for name, value in model.state_dict().items():
        weights.update(f"{name} {getattr(value, 'dtype', '')} {list(getattr(value, 'shape', ()))}".encode())
        if isinstance(value, torch.Tensor):
            weights.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return weights.hexdigest()[:12]
