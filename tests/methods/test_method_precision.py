"""The precision in which a model runs: as the autocast option of a method says, whatever the caller's autocast is."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch
from test_method_contract import FEW, ON_A_VIT, X, close, model_of, usual
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    assert set(ON_A_VIT) == set(METHODS) - {"bcos", "tam"}


def test_an_autocast_of_the_caller_does_not_round_the_backward_pass():
    model, images = tiny_models.vit(), tiny_models.images()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = effective_transformation(model, images, 0)
    close(rounded, effective_transformation(model, images, 0), tolerance=0)


class OnDevice(TorchFunctionMode):
    """A pretended device without float64, such as Apple's GPUs: it holds the images, the model and all made of them.

    Main memory has float64 still: what goes through ``.cpu()`` or ``.to("cpu")`` is there.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.dispatch, self.held = OnDeviceOperations(self), []
        self.places: dict[int, bool] = {}
        for tensor in tensors:
            self.place(tensor, device=True)

    def place(self, tensor: torch.Tensor, *, device: bool) -> None:
        storage = tensor.untyped_storage()
        self.places[storage.data_ptr()] = device
        self.held.append(storage)  # so that no other tensor gets its address
        assert not device or tensor.dtype is not torch.float64, "float64 on a device that has none"

    def is_there(self, tensor: torch.Tensor) -> bool:
        return self.places.get(tensor.untyped_storage().data_ptr(), False)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        where = kwargs.get("device", args[1] if func is torch.Tensor.to else None)
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and where == "cpu"):
            copy = torch.from_numpy(args[0].detach().numpy().copy())  # out of sight of the operations
            self.place(copy, device=False)
            return func(copy, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and isinstance(where, torch.device):
            self.place(result, device=True)
        return result


class OnDeviceOperations(TorchDispatchMode):
    def __init__(self, device: OnDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(map(self.device.is_there, given)):
            wide = [one for one in given if one.dtype is torch.float64 and one.ndim]
            assert not wide, f"{func.name()} on the device is given float64"
            for one in tree_leaves(result):
                if isinstance(one, torch.Tensor):
                    self.device.place(one, device=True)
        return result


@contextmanager
def without_float64(monkeypatch, model: torch.nn.Module, images: torch.Tensor):
    for name, module in list(sys.modules.items()):
        if name.startswith("dave_vit") and hasattr(module, "precise_dtype"):
            monkeypatch.setattr(module, "precise_dtype", lambda device: torch.float32)
    device = OnDevice(images, *model.parameters(), *model.buffers())
    with device.dispatch, device:
        yield


RIVALS = ["attn_lrp", "chefer_lrp", "libragrad", "legrad", "gradcam", "integrated_gradients", "attention_flow", "mda"]


@pytest.mark.parametrize("name", ["dave", "dave:paper", *RIVALS, "vit_cx", "lime", "tis"])
def test_no_float64_on_a_device_without_it(name, monkeypatch):
    name, _, preset = name.partition(":")
    options = FEW.get(name, {}) | ({"preset": preset} if preset else {})
    expected = create_method(name, model_of("vit"), **options).attribute(X, [0, 1, 2])
    model = tiny_models.vit()  # of which nothing is known yet
    with without_float64(monkeypatch, model, X):
        found = create_method(name, model, **options).attribute(X, [0, 1, 2])
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))
