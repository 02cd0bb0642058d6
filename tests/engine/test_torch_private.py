"""Private names of torch live in one module, and maps are the same without those that a version may lack."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny_models
from dave_vit import DAVE
from dave_vit._internal import torch_private
from dave_vit.engine import gradient
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.errors import CheckpointingError, UnsupportedOperator

SOURCE = Path(torch_private.__file__).parents[1]
OPTIONAL = ["_count_dispatch_modes", "_is_wrapped", "_unwrap", "_choose_attention", "_clear_workspaces"]
X = tiny_models.images(2)


def test_private_names_live_in_one_module():
    names = [r"torch\._[a-z]", r"from torch[\w.]*\._", r"torch\.utils\._", r"torch\.fx\.experimental"]
    private = re.compile("|".join([*names, r"nn\.modules\.\w+( import |\.)_"]))
    users = {path.name for path in SOURCE.rglob("*.py") if private.search(path.read_text())}
    assert users == {"torch_private.py"}


@pytest.fixture
def bare_torch(monkeypatch):
    """A torch that lacks every name which some version lacks."""
    for name in OPTIONAL:
        monkeypatch.setattr(torch_private, name, None)


def test_maps_are_the_same_without_them(bare_torch, monkeypatch):
    model = tiny_models.vit()
    actual = DAVE(model, samples=2).attribute(X, 1)
    monkeypatch.undo()
    torch.testing.assert_close(actual, DAVE(tiny_models.vit(), samples=2).attribute(X, 1), rtol=0, atol=0)


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
def test_what_is_refused_is_refused_without_them(function, bare_torch):
    with pytest.raises((UnsupportedOperator, CheckpointingError)):
        gradient(Tokens(function), X, 1, rules=EFFECTIVE)


def test_no_hooks_are_seen_where_there_are_none():
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch_private.saved_tensor_hooks() is None


def test_a_graph_is_captured_with_workspaces_of_its_own(monkeypatch):
    events = []
    monkeypatch.setattr(torch_private, "_clear_workspaces", lambda: events.append("clear"))
    with torch_private.own_workspaces():
        events.append("capture")
    assert events == ["clear", "capture", "clear"]


def test_no_graph_is_captured_where_workspaces_are_shared(bare_torch):
    with pytest.raises(RuntimeError, match="workspaces"), torch_private.own_workspaces():
        pass


def test_the_package_is_imported_by_a_torch_without_them():
    code = "import torch\ndel torch._C._len_torch_dispatch_stack\ndel torch._fused_sdp_choice\nimport dave_vit"
    code += "\nfrom torch import nn\nmodel = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.ReLU(), nn.Linear(3, 2))"
    code += "\nprint(dave_vit.conservation_gap(model.double(), torch.ones(1, 3, 2, 2, dtype=torch.float64), 1) < 1e-12)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
