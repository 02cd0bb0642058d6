"""Private names of torch live in one module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny_models
from dave_vit._internal import torch_private
from dave_vit.engine import gradient
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.errors import CheckpointingError, UnsupportedOperator

SOURCE = Path(torch_private.__file__).parents[1]
X = tiny_models.images(2)


def test_private_names_live_in_one_module():
    names = [r"torch\._[a-z]", r"from torch[\w.]*\._", r"torch\.utils\._", r"torch\.fx\.experimental"]
    private = re.compile("|".join([*names, r"nn\.modules\.\w+( import |\.)_"]))
    users = {path.name for path in SOURCE.rglob("*.py") if private.search(path.read_text())}
    assert users == {"torch_private.py"}


class Tokens(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x).flatten(1)


def _save_elsewhere(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return F.gelu(x)


@pytest.mark.parametrize(
    "function",
    [
        _save_elsewhere,
        lambda x: checkpoint(F.gelu, x, use_reentrant=False),
        lambda x: x + torch.func.vmap(torch.exp)(x.detach()),
    ],
)
def test_what_hides_its_derivative_is_refused(function):
    with pytest.raises((UnsupportedOperator, CheckpointingError)):
        gradient(Tokens(function), X, 1, rules=EFFECTIVE)


def test_no_hooks_are_seen_where_there_are_none():
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch_private.saved_tensor_hooks() is None


def test_a_graph_is_captured_with_workspaces_of_its_own(monkeypatch):
    events = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: events.append("clear"), raising=False)
    with torch_private.own_workspaces():
        events.append("capture")
    assert events == ["clear", "capture", "clear"]
