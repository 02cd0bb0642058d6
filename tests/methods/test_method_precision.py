"""The precision in which a model runs: as the autocast option of a method says, whatever the caller's autocast is."""

from __future__ import annotations

import pytest
import torch
from test_method_contract import FEW, ON_A_VIT, X, close, model_of, usual
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_models
from dave_vit import METHODS, create_method, effective_transformation

# The relevance of chefer_lrp is always computed in float64; its gradient is not.
ALSO = {"chefer_lrp": {torch.float64}}


class PatchEmbeddingTypes(TorchDispatchMode):
    """Collects the types in which the first convolution of a model is really computed, recorded or not."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.shape, self.types = model.patch_embed.proj.weight.shape, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in func.name() and "backward" not in func.name() and args[1].shape == self.shape:
            self.types |= {args[0].dtype, args[1].dtype}
        return func(*args, **(kwargs or {}))


def types_of(name: str, **options) -> set[torch.dtype]:
    model = model_of("vit")
    with PatchEmbeddingTypes(model) as seen:
        create_method(name, model, **FEW.get(name, {}) | options).attribute(X[:2])
    return seen.types


@pytest.mark.parametrize("name", ON_A_VIT)
class TestEveryMethod:
    def test_the_model_runs_in_the_type_of_the_option(self, name):
        assert types_of(name) == {torch.float32} | ALSO.get(name, set())
        assert types_of(name, autocast=torch.bfloat16) == {torch.bfloat16} | ALSO.get(name, set())

    def test_an_autocast_of_the_caller_changes_nothing(self, name):
        with torch.autocast("cpu", torch.bfloat16):
            found = create_method(name, model_of("vit"), **FEW.get(name, {})).explain(X, [0, 1, 2])
        assert torch.equal(found.attribution, usual(name).attribution)


def test_every_method_is_tested():
    assert set(ON_A_VIT) == set(METHODS) - {"bcos"}


def test_an_autocast_of_the_caller_does_not_round_the_backward_pass():
    model, images = tiny_models.vit(), tiny_models.images()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = effective_transformation(model, images, 0)
    close(rounded, effective_transformation(model, images, 0), tolerance=0)
