"""Models as large ones are run: half precision, accelerate, int8 weights; parameters are neither copied nor changed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from dave_vit import create_method, load_model, with_inputs
from dave_vit.engine.scores import Token
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
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_parameters_are_refused(place, part, folders, photograph, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    writer = load_model(f"hf:{folders('Qwen3-VL')}")
    folder = {"offload_dir": tmp_path} if place == "disk" else {}
    getattr(accelerate, f"{place}_offload")(writer.get_submodule(part), execution_device="cpu", **folder)
    with pytest.raises(ModelError, match="offloaded") as error:
        explain(writer, photograph, "effective")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_device_map(place, folders, photograph, tmp_path):
    pytest.importorskip("accelerate")
    import transformers

    plain, writer = (load_model(f"hf:{folders('Qwen3-VL')}") for _ in range(2))
    places = {"model.visual": "cpu", "model.language_model": place, "lm_head": "cpu"}
    model = transformers.AutoModelForImageTextToText
    writer.model = model.from_pretrained(folders("Qwen3-VL"), device_map=places, offload_folder=tmp_path).eval()
    if place == "cpu":
        assert torch.equal(explain(writer, photograph, "effective"), explain(plain, photograph, "effective"))
    else:
        with pytest.raises(ModelError, match="offloaded"):
            explain(writer, photograph, "effective")


def quantize(weights, quantization):
    """Return a configuration of torchao."""
    if weights == "int8":
        return quantization.Int8WeightOnlyConfig()
    return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(16))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("method", METHODS)
def test_small_weights_are_read_where_they_are(method, weights, folders, photograph, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    import transformers

    in_memory = load_model(f"hf:{folders('Qwen3-VL')}")
    quantization.quantize_(in_memory.model, quantize(weights, quantization))
    copy = shutil.copytree(folders("Qwen3-VL"), tmp_path / "copy")
    config = transformers.TorchAoConfig(quantize(weights, quantization))
    transformers.AutoModelForImageTextToText.from_pretrained(copy, quantization_config=config).save_pretrained(copy)
    for quantized in (in_memory, load_model(f"hf:{copy}")):
        whole, packed = load_model(f"hf:{folders('Qwen3-VL')}"), 0
        with torch.no_grad():
            for own, small in zip(whole.parameters(), quantized.parameters(), strict=True):
                packed += hasattr(small, "__tensor_flatten__")
                own.copy_(small.dequantize() if hasattr(small, "__tensor_flatten__") else small)
        assert packed > 20
        expected = explain(whole, photograph, method)
        found = explain(quantized, photograph, method)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_of_bitsandbytes_are_refused(bits, folders, photograph, tmp_path):
    pytest.importorskip("bitsandbytes")
    import transformers

    copy = shutil.copytree(folders("Qwen3-VL"), tmp_path / "copy")
    config = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    model = transformers.AutoModelForImageTextToText.from_pretrained(copy, quantization_config=config)
    bound = with_inputs(model, input_ids=torch.tensor([[1]]))
    with pytest.raises(ModelError, match="layers of bitsandbytes round what they are given"):
        create_method("effective", bound).attribute(torch.zeros(1, 3, 64, 64), Token(1))
    model.save_pretrained(copy)
    with pytest.raises(ModelError, match="layers of bitsandbytes") as error:
        load_model(f"hf:{copy}")
    assert "\n" not in str(error.value)
