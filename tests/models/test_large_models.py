"""Models as large ones are run: half precision, accelerate, int8 weights; parameters are neither copied nor changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from dave_vit import create_method, load_model
from dave_vit.engine.targets import ScoreSet
from dave_vit.errors import ModelError
from writer_folders import saved_folders  # noqa: F401

QUESTION, ANSWER = "what is on the table ?", "red cat"
METHODS = ("effective", "dave", "attn_lrp")


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8))


def explain(writer, photograph, method):
    answered = writer.with_prompt(photograph, QUESTION, answer=ANSWER)
    options = {"samples": 2} if method == "dave" else {}
    scores = ScoreSet(tuple(answered.scores(range(2))))
    return create_method(method, answered, **options).attribute(answered.inputs, scores)


class WideCopies(TorchDispatchMode):
    """Collects the functions that make a float32 tensor of the size of a weight out of it."""

    def __init__(self, model):
        super().__init__()
        self.places = {one.untyped_storage().data_ptr() for one in model.parameters() if one.ndim > 1}
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_wide = isinstance(result, torch.Tensor) and result.dtype is torch.float32
        first = next((one for one in args if isinstance(one, torch.Tensor)), None)
        if is_wide and first is not None and first.untyped_storage().data_ptr() in self.places:
            self.found += [str(func)] if result.numel() >= first.numel() else []
        return result


@pytest.mark.parametrize("method", METHODS)
def test_half_weights_are_used_where_they_are(method, folders, photograph):
    writer = load_model(f"hf:{folders('Qwen2-VL')}").bfloat16()
    before = [(one.data_ptr(), one.dtype, one.requires_grad) for one in writer.parameters()]
    with WideCopies(writer) as copies:
        explain(writer, photograph, method)
    assert not copies.found
    assert [(one.data_ptr(), one.dtype, one.requires_grad) for one in writer.parameters()] == before


def test_hooks_of_accelerate_change_nothing(folders, photograph):
    accelerate = pytest.importorskip("accelerate")
    plain, hooked = (load_model(f"hf:{folders('Qwen2-VL')}") for _ in range(2))
    accelerate.dispatch_model(hooked.model, {"": "cpu"}, force_hooks=True)
    assert torch.equal(explain(hooked, photograph, "effective"), explain(plain, photograph, "effective"))


@pytest.mark.parametrize("part", ["model", "model.model.language_model"])
def test_offloaded_parameters_are_refused(part, folders, photograph):
    accelerate = pytest.importorskip("accelerate")
    writer = load_model(f"hf:{folders('Qwen2-VL')}")
    accelerate.cpu_offload(writer.get_submodule(part), execution_device="cpu")
    with pytest.raises(ModelError, match="offloaded"):
        explain(writer, photograph, "effective")


@pytest.mark.parametrize("method", METHODS)
def test_int8_weights_are_read_where_they_are(method, folders, photograph):
    quantization = pytest.importorskip("torchao.quantization")
    quantized, whole = (load_model(f"hf:{folders('Qwen2-VL')}") for _ in range(2))
    quantization.quantize_(quantized.model, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        for own, small in zip(whole.parameters(), quantized.parameters(), strict=True):
            own.copy_(small.dequantize() if hasattr(small, "__tensor_flatten__") else small)
    expected = explain(whole, photograph, method)
    torch.testing.assert_close(explain(quantized, photograph, method), expected, rtol=1e-4, atol=1e-5)
