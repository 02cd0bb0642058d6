"""The precision in which a model runs: as the autocast option of a method says, whatever the caller's autocast is."""

from __future__ import annotations

import sys

import pytest
import torch
from test_method_contract import ON_A_VIT, X, close, model_of, usual
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_models
from dave_vit import METHODS, create_method, effective_transformation
from pretended_device import pretend_device

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
        create_method(name, model, **tiny_models.FEW.get(name, {}) | options).attribute(X[:2])
    return seen.types


@pytest.mark.parametrize("name", ON_A_VIT)
class TestEveryMethod:
    def test_the_model_runs_in_the_type_of_the_option(self, name):
        assert types_of(name) == {torch.float32} | ALSO.get(name, set())
        assert types_of(name, autocast=torch.bfloat16) == {torch.bfloat16} | ALSO.get(name, set())

    def test_an_autocast_of_the_caller_changes_nothing(self, name):
        with torch.autocast("cpu", torch.bfloat16):
            found = create_method(name, model_of("vit"), **tiny_models.FEW.get(name, {})).explain(X, [0, 1, 2])
        assert torch.equal(found.attribution, usual(name).attribution)


def test_every_method_is_tested():
    assert set(ON_A_VIT) == set(METHODS) - {"bcos", "tam"}


def test_an_autocast_of_the_caller_does_not_round_the_backward_pass():
    model, images = tiny_models.vit(), tiny_models.images()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = effective_transformation(model, images, 0)
    close(rounded, effective_transformation(model, images, 0), tolerance=0)


RIVALS = ["attn_lrp", "chefer_lrp", "libragrad", "legrad", "gradcam", "integrated_gradients", "attention_flow", "mda"]


@pytest.mark.parametrize("name", ["dave", "dave:paper", *RIVALS, "vit_cx", "lime", "tis"])
def test_no_float64_on_a_device_without_it(name, monkeypatch):
    name, _, preset = name.partition(":")
    options = tiny_models.FEW.get(name, {}) | ({"preset": preset} if preset else {})
    expected = create_method(name, model_of("vit"), **options).attribute(X, [0, 1, 2])
    model = tiny_models.vit()  # of which nothing is known yet
    for module in [module for name, module in sys.modules.items() if name.startswith("dave_vit")]:
        if hasattr(module, "precise_dtype"):
            monkeypatch.setattr(module, "precise_dtype", lambda device: torch.float32)
    with pretend_device(X, *model.parameters(), float64=False):
        found = create_method(name, model, **options).attribute(X, [0, 1, 2])
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def test_the_host_waits_for_the_device_a_few_times_whatever_the_depth():
    def waits(depth: int) -> int:
        model = tiny_models.vit(depth=depth)
        dave = create_method("dave", model)
        dave.explain(X[:1], 0)  # what is only done the first time may wait
        with pretend_device(X, *model.parameters()) as device:
            dave.explain(X[:1], 0)
        return device.waits

    assert waits(2) == waits(6) <= 8
