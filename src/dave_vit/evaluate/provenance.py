"""What rows are computed with: the code, the libraries and the weights of the models, by content."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import nn

from dave_vit._internal.content_hash import PACKAGE, hash_code, hash_file
from dave_vit._internal.environment import versions

# Files that no row depends on: what runs tasks, summarises rows and shows results.
_NOT_IN_ROWS = (
    *("analysis", "cli", "explain", "viz", "web", "evaluate/dispatch.py", "evaluate/engines"),
    *(f"evaluate/{name}.py" for name in ("progress", "report", "results_table", "run", "store")),
    *(f"evaluate/statistics/{name}.py" for name in ("compare", "intervals", "scores", "summary", "variance")),
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
