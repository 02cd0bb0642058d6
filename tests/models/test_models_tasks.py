"""Detectors, segmentation, depth, and models of pictures and words, from small configurations of transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tiny_models
from dave_vit import DAVE, conservation_gap, effective_transformation, with_inputs
from dave_vit.checks.companion_values import replay
from dave_vit.checks.doctor import Float64Mode
from dave_vit.engine import scores
from dave_vit.engine.targets import Target
from dave_vit.errors import InputError, OptionError
from dave_vit.models import with_embeddings
from dave_vit.models.frozen_factors import FrozenFactors
from dave_vit.models.pixel_formats import PackedPatches
from model_coverage import LIMIT, Entry, architectures, check

# One of each kind; tests/models/test_models_coverage.py has them all.
EXACT = ["DETR", "UPerNet", "SAM with a point", "DPT", "CLIP, both halves", "LLaVA, eager attention", "Qwen2-VL"]
EXACT += ["OWL-ViT", "EoMT, mask"]
REFUSED = {"FocalNet": "modulation", "Ovis 2": "softmax in module"}


def entry(family: str) -> Entry:
    (found,) = [entry for entry in architectures("transformers") if entry.family == family]
    return found


@pytest.mark.parametrize("family", EXACT)
def test_exact(family):
    row = check(entry(family))
    assert row.state == "exact", row.reason
    assert row.gap < LIMIT
    assert row.forward < 1e-6


@pytest.mark.parametrize(("family", "said"), REFUSED.items())
def test_refused_by_name(family, said):
    row = check(entry(family))
    assert row.state == "unsupported"
    assert said in row.reason


HELD = ["RT-DETR", "RF-DETR", "D-FINE", "OWLv2", "OneFormer, class", "Mask2Former, mask", "SAM 3 with a text, object"]


@pytest.mark.parametrize(
    "family",
    [family if family in ("OWLv2", "RF-DETR") else pytest.param(family, marks=pytest.mark.slow) for family in HELD],
)
def test_w_is_the_derivative_with_factors_held(family):
    """Against a replay of the model by torch's own functions, for another image and with the operators of the first."""
    task = entry(family)
    model = tiny_models.drawn(task.build()).double()
    images = torch.randn(2, 1, *task.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    read = Target(score=task.score).read
    with Float64Mode():
        weight = effective_transformation(model, images[0], task.score)
        values = [replay(model, images[0], other, read) for other in images]
    step = float((weight * (images[1] - images[0])).sum())
    assert float(values[1] - values[0]) == pytest.approx(step, rel=1e-8)


@pytest.mark.parametrize("family", ["OWLv2", "EoMT, mask"])
def test_frozen_factors_change_no_value(family):
    task = entry(family)
    held = tiny_models.drawn(task.build())
    image = torch.randn(1, *task.shape)
    assert torch.equal(task.score(held(image)), task.score(without_replacements(held)(image)))


def without_replacements(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, FrozenFactors):
            module.replacements = {}
    return plain


def test_dave_explains_a_box_of_a_detector():
    detector = tiny_models.drawn(entry("YOLOS").build())
    image = torch.randn(1, 3, 64, 64)
    attribution = DAVE(detector, samples=3).attribute(image, scores.Detection(1, box=(0.2, 0.2, 0.6, 0.7)))
    assert attribution.shape == image.shape
    assert attribution.isfinite().all()
    assert attribution.any()


class InSinglePrecision(nn.Module):
    """A language model's norm: in float32, whatever the model's type is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.flatten(1).to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True))).float().to(x.dtype)


def test_casts_inside_of_a_model_do_not_hide_what_is_left_over():
    image = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    plain = conservation_gap(InSinglePrecision(), image, 0)
    with Float64Mode():
        assert torch.empty(1).dtype == torch.float64
        assert conservation_gap(InSinglePrecision(), image, 0) < 1e-14 < plain
    assert torch.empty(1).dtype == torch.float32
    single = image.float()
    with Float64Mode():
        assert InSinglePrecision()(single).dtype == torch.float32


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_words_of_a_prompt_given_the_image(name):
    import transformers

    from model_coverage.hf_entries import TWO_HALVES

    config = getattr(transformers, f"{name}Config")(**TWO_HALVES)
    model = tiny_models.drawn(getattr(transformers, f"{name}Model")(config)).double()
    ids, pixels = torch.tensor([[1, 5, 6, 2]]), torch.randn(1, 3, 64, 64, dtype=torch.float64)
    prompt = with_embeddings(model, input_ids=ids, pixel_values=pixels)

    def alike(output):
        return output.logits_per_image.diagonal()

    weight = effective_transformation(prompt, prompt.embedded, alike)
    assert (weight * prompt.embedded).sum(-1).shape == ids.shape
    assert conservation_gap(prompt, prompt.embedded, alike) < 1e-9
    own = model(input_ids=ids, pixel_values=pixels)
    torch.testing.assert_close(prompt(prompt.embedded).logits_per_image, own.logits_per_image)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(OptionError, match="give input_ids"):
        with_embeddings(model, pixel_values=pixels)


def test_packed_patches_are_those_of_the_processor():
    from transformers import Qwen2VLImageProcessor

    options = {"do_resize": False, "do_rescale": False, "do_normalize": False, "patch_size": 14, "merge_size": 2}
    image = torch.rand(3, 56, 84)
    expected = Qwen2VLImageProcessor(**options)(images=[image], return_tensors="pt")
    made = PackedPatches()(image[None])
    torch.testing.assert_close(made["pixel_values"], expected["pixel_values"])
    assert torch.equal(made["image_grid_thw"], expected["image_grid_thw"])
    assert PackedPatches()(image[None].repeat(2, 1, 1, 1))["pixel_values"].shape[0] == 2 * 24
    with pytest.raises(InputError, match="multiples of 28"):
        PackedPatches()(image[None, :, :50])


def test_a_function_may_arrange_the_explained_input():
    class Doubled(nn.Module):
        def forward(self, left, right, factor):
            return (left + right).flatten(1)[:, :4] * factor

    model = with_inputs(Doubled(), lambda x: {"left": x, "right": 2 * x}, factor=2.0)
    image = torch.randn(1, 3, 2, 2)
    weight = effective_transformation(model, image, 1)
    torch.testing.assert_close(weight.flatten()[1], torch.tensor(6.0))
