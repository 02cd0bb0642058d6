"""The embedded models: quick to load, good at their task, and the same as their references."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import cache
from importlib import resources

import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit import create_method, load_model
from dave_vit.checks.doctor import diagnose
from dave_vit.data.builtin import CLASS_NAMES, compose_scene
from dave_vit.engine.observation import find_token_layout
from dave_vit.errors import InputError
from dave_vit.maps import collapse
from dave_vit.metrics import energypg
from dave_vit.models import Adapter
from dave_vit.models.architectures.vits import BcosViT, PlainViT
from dave_vit.models.families.builtin import BUILTIN
from tiny_models import drawn

NAMES = list(BUILTIN)
BCOS_LATER = ["builtin", pytest.param("builtin-bcos", marks=pytest.mark.slow)]
SEED = 50_000  # neither training nor its settings saw it

LOADING = """
import sys, time, torch
began = time.process_time()
from dave_vit import create_method, load_model
model = load_model("builtin")
seconds = time.process_time() - began
create_method("effective", model).attribute(torch.rand(1, 3, 224, 224), 0)
print(seconds, *(name in sys.modules for name in ("timm", "torchvision", "torch._dynamo")))
"""


@cache
def loaded(name: str) -> Adapter:
    return load_model(name)


@cache
def pictures(split: str, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Colours [N, 3, H, W] in 0..1, labels [N, K] and masks [N, K, H, W]."""
    scenes = [compose_scene(index, split, seed=SEED) for index in range(count)]
    images = np.stack([scene.image.transpose(2, 0, 1) for scene in scenes])
    labels = torch.tensor([[thing.label for thing in scene.targets] for scene in scenes])
    masks = np.stack([np.stack([thing.mask for thing in scene.targets]) for scene in scenes])
    return torch.from_numpy(images).float() / 255, labels, torch.from_numpy(masks)


def timm_twin(model: PlainViT) -> torch.nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    dim, block = model.norm.normalized_shape[0], model.blocks[0]
    twin = VisionTransformer(
        img_size=model.size,
        patch_size=model.patch_embed.proj.stride[0],
        num_classes=model.head.out_features,
        embed_dim=dim,
        depth=len(model.blocks),
        num_heads=block.attn.num_heads,
    )
    twin.load_state_dict(model.state_dict())
    return twin.eval()


@pytest.fixture(scope="module")
def small() -> PlainViT:
    return drawn(PlainViT(7, dim=24, depth=3, heads=3, size=32, patch=8))


@pytest.mark.parametrize("name", BCOS_LATER)
def test_new_cluttered_pictures_are_recognised(name):
    model, (images, labels, _) = loaded(name), pictures("single", 60)
    with torch.inference_mode():
        predicted = model(BUILTIN[name].encode(images)).argmax(1)
    assert (predicted == labels[:, 0]).float().mean() >= 0.93


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_small(name):
    file = resources.files("dave_vit.models") / "weights" / f"{name}.safetensors"
    assert len(file.read_bytes()) <= 12e6
    assert 3e6 <= sum(parameter.numel() for parameter in loaded(name).parameters()) <= 6e6


def test_loading_is_quick_and_neither_it_nor_a_map_needs_libraries_of_models_or_compilers():
    """In processor seconds, since other processes share the machine."""
    command = [sys.executable, "-c", LOADING]
    seconds, *imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert float(seconds) < 1
    assert imported == ["False"] * 3


@pytest.mark.parametrize("name", NAMES)
def test_adapter_has_what_the_contract_says(name):
    model = loaded(name)
    scene = compose_scene(0, "plain")
    inputs = model.preprocess(Image.fromarray(scene.image))
    colours = torch.from_numpy(scene.image).permute(2, 0, 1)[None].float() / 255
    torch.testing.assert_close(inputs, BUILTIN[name].encode(colours))
    torch.testing.assert_close(model.preprocessing.picture(inputs), colours)
    assert model.class_names == list(CLASS_NAMES)
    assert not model.training
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


# --- The plain ViT is timm's ------------------------------------------------------------------------------------------


def test_logits_equal_those_of_timms_class():
    model = loaded("builtin").model
    inputs = BUILTIN["builtin"].encode(pictures("single", 2)[0])
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs), timm_twin(model)(inputs), rtol=1e-6, atol=1e-6)


def test_parameters_and_modules_are_named_as_in_timm(small):
    twin = timm_twin(small)
    assert [(key, value.shape) for key, value in small.state_dict().items()] == [
        (key, value.shape) for key, value in twin.state_dict().items()
    ]
    theirs = dict(twin.named_modules())
    for path, module in small.named_modules():
        assert type(module).__name__ == type(theirs[path]).__name__ or path == ""


def test_initial_weights_are_spread_as_in_timm():
    torch.manual_seed(0)
    mine = PlainViT(50, dim=96, depth=1, heads=3, size=64)
    from timm.models.vision_transformer import VisionTransformer

    theirs = VisionTransformer(img_size=64, num_classes=50, embed_dim=96, depth=1, num_heads=3).state_dict()
    for key, value in mine.state_dict().items():
        assert float(value.std()) == pytest.approx(float(theirs[key].std()), rel=0.2, abs=1e-9), key


@pytest.mark.parametrize("method", ["effective", "input_x_gradient", "legrad", "chefer_generic", "rollout"])
def test_methods_treat_both_alike(small, method):
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mine, theirs = (create_method(method, model).attribute(images, [1, 2]) for model in (small, timm_twin(small)))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6 * float(theirs.abs().max()))


def test_another_size_is_refused(small):
    with pytest.raises(InputError, match=r"48x48.*32x32"):
        small(torch.zeros(1, 3, 48, 48))


@pytest.mark.parametrize("name", BCOS_LATER)
def test_doctor_finds_them_exact(name):
    model = load_model(name)  # examined in float64, so not the shared one
    inputs = BUILTIN[name].encode(pictures("single", 1)[0])
    finding = diagnose(model, inputs)
    assert finding.dtype == torch.float64
    assert finding.exact
    assert finding.gap < 1e-12
    assert (finding.layout.grid, finding.layout.prefix) == ((14, 14), 1 if name == "builtin" else 0)
    assert find_token_layout(model.float(), inputs) == finding.layout


# --- The B-cos ViT is the bcos package's ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("explaining", [False, True])
def test_bcos_equals_the_package(explaining):
    """Logits, and the gradients that make its inherent explanation."""
    pytest.importorskip("bcos", reason="the bcos extra is not installed")
    from dave_vit.models.families.bcos import build

    theirs = build("simple_vit_ti_patch16_224", num_classes=len(CLASS_NAMES)).eval()
    mine = BcosViT(len(CLASS_NAMES)).eval()
    mine.load_state_dict(loaded("builtin-bcos").model.state_dict())
    theirs.load_state_dict({f"0.{key}": value for key, value in mine.state_dict().items()})
    theirs[1].logit_bias = math.log(1 / (len(CLASS_NAMES) - 1))  # the package keeps that of 1000 classes
    results = []
    for model in (mine, theirs):
        for module in model.modules():
            if explaining and hasattr(module, "set_explanation_mode"):
                module.set_explanation_mode(True)
        inputs = BUILTIN["builtin-bcos"].encode(pictures("single", 2)[0]).requires_grad_()
        logits = model(inputs)
        logits.amax(1).sum().backward()
        results.append((logits.detach(), inputs.grad))
    for ours, others in zip(*results, strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-5 * float(others.abs().max()))


# --- Maps -------------------------------------------------------------------------------------------------------------


def own_and_other(method: str, count: int, name: str = "builtin", **options: object) -> tuple[float, float]:
    """Mean share of a map on the explained object and on the other one."""
    images, labels, masks = pictures("pair", count)
    inputs = BUILTIN[name].encode(images)
    attribution = create_method(method, loaded(name), **options).attribute(inputs, labels)  # [B, 2, C, H, W]
    maps = collapse(attribution.flatten(0, 1))
    own, other = (energypg(maps, regions.flatten(0, 1)).nanmean() for regions in (masks, masks.flip(1)))
    return float(own), float(other)


def test_maps_of_two_objects_differ_by_class():
    own, other = own_and_other("effective", 3)
    assert own > 2 * other


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_dave_maps_lie_on_the_explained_object(name):
    own, other = own_and_other("dave", 2 if name == "builtin" else 4, name, samples=8)  # whose maps vary less
    assert own > max(0.4, 2 * other)
    assert other < 0.2
