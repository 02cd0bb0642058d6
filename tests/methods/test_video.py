"""Clips [B, T, C, H, W]: explained as images are, one map a frame."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny_models
from dave_vit import METHODS, conservation_gap, create_method
from dave_vit.engine import gradient
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.errors import InputError
from dave_vit.neighborhood import Neighborhood, Noise, Spatial

FRAMES = 4
CLIPS = torch.randn(2, FRAMES, 3, 32, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SHAPE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
ONE_IMAGE = {"fullgrad", "omenn", "gradcam", "raw_attention", "rollout", "attention_flow", "chefer_lrp"} | {
    "chefer_generic",
    "legrad",
    "iia",
    "gradcam_plus_plus",
    "layercam",
    "hirescam",
    "scorecam",
    "eigencam",
    "ablationcam",
    "finercam",
    "beyond_intuition",
    "libragrad",
    *tiny_models.HIDING,
}
FEW = {
    "dave": {"samples": 3},
    "equivariant": {"samples": 3},
    "smoothgrad": {"samples": 3},
    "integrated_gradients": {"steps": 3},
    "expected_gradients": {"samples": 3},
}


def video(name: str, attention: str = "sdpa") -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")
    kinds = {
        "VideoMAE": {"tubelet_size": 2, "image_size": 32, "patch_size": 8, "num_frames": FRAMES},
        "Timesformer": {"image_size": 32, "patch_size": 8, "num_frames": FRAMES},
        "Vivit": {"tubelet_size": [2, 8, 8], "image_size": 32, "num_frames": FRAMES},
    }
    made = config(num_labels=5, **SHAPE, **kinds[name])
    if name != "Timesformer":  # which has one form of attention
        made._attn_implementation = attention
    return tiny_models.drawn(getattr(transformers, f"{name}ForVideoClassification")(made)).double()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["VideoMAE", "Timesformer", "Vivit"])
def test_conservation(name, attention):
    model = video(name, attention)
    assert conservation_gap(model, CLIPS, [0, 3]) < 1e-9
    passed = gradient(model, CLIPS, 1, rules=EFFECTIVE)
    assert passed.weight[:, 0].shape == CLIPS.shape
    torch.testing.assert_close(passed.logits, model(CLIPS).logits)


MODEL = video("VideoMAE")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("bcos", "tam")])
def test_every_method_explains_clips_or_says_why_not(name):
    method = create_method(name, MODEL, **FEW.get(name, {}))
    if name in ONE_IMAGE:
        with pytest.raises(InputError, match="not clips"):
            method.explain(CLIPS, 1)
        return
    explanation = method.explain(CLIPS, 1)
    assert explanation.attribution.shape == CLIPS.shape
    assert explanation.map.shape == (2, FRAMES, 32, 32)
    torch.testing.assert_close(explanation.map, explanation.attribution.sum(2))
    several = method.explain(CLIPS, [[1, 2], [1, 0]])
    assert several.attribution.shape == (2, 2, FRAMES, 3, 32, 32)
    assert several.map.shape == (2, 2, FRAMES, 32, 32)
    torch.testing.assert_close(several.attribution[:, 0], explanation.attribution)
    if explanation.standard_error is not None:
        assert explanation.standard_error.shape == (2, FRAMES, 32, 32)


def test_chunks_do_not_show():
    whole = create_method("dave", MODEL, samples=4).attribute(CLIPS, [1, 2])
    torch.testing.assert_close(create_method("dave", MODEL, samples=4, chunk=3).attribute(CLIPS, [1, 2]), whole)


def test_frames_of_a_clip_share_the_warp_and_not_the_noise():
    still = torch.randn(1, 1, 3, 16, 16, dtype=torch.float64).expand(2, FRAMES, 3, 16, 16)
    moving = Neighborhood(spatial=Spatial(rotation=15), noise=Noise("none"))
    views = moving.views((FRAMES, 3, 16, 16), samples=3).apply(still)
    assert views.shape == (3, *still.shape)
    torch.testing.assert_close(views, views[:, :, :1].expand_as(views))
    as_image = moving.views((3, 16, 16), samples=3).apply(still[:, 0])
    torch.testing.assert_close(views[:, :, 0], as_image)
    noisy = Neighborhood(spatial=Spatial(flip=0, rotation=0, translation=0)).views((FRAMES, 3, 16, 16), samples=3)
    seen = noisy.apply(still)
    assert not torch.equal(seen[:, :, 0], seen[:, :, 1])
    torch.testing.assert_close(seen[:, 0], seen[:, 1])  # clips of a batch share the draws


def test_pulled_back_frames_are_where_they_were():
    views = Neighborhood(spatial=Spatial(flip=0.5, rotation=0), noise=Noise("none")).views(
        (FRAMES, 3, 16, 16), samples=4
    )
    seen = views.apply(CLIPS[..., :16, :16])
    back = views.pull_back(seen.flatten(1, 2)).reshape(seen.shape)
    torch.testing.assert_close(back, CLIPS[..., :16, :16].expand_as(back))


def test_other_shapes_are_refused():
    with pytest.raises(InputError, match=r"clips \[B, T, C, H, W\]"):
        create_method("dave", MODEL).attribute(CLIPS[0, 0], 1)
