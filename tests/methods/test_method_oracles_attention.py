"""Methods on tokens, and B-cos, against recorded outputs of public reference implementations on real images."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from dave_vit import create_method

pytestmark = pytest.mark.realdata

QUICK = ["p0_t991", "pm_t340"]
REST = ["p1_t852", "p3_t781", "p5_t753", "p7_t264"]  # of the recorded ones every second
PAIRS = [*QUICK, *(pytest.param(pair, marks=pytest.mark.slow) for pair in REST)]

# Recorded 14x14 arrays: our method and options, and the least cosine similarity. All differ by rounding alone, which
# chefer_lrp amplifies.
ORACLES = {
    "chefer_rollout": ("rollout", {}, 1 - 1e-9),
    "chefer_rollout_s1": ("rollout", {"start_layer": 1}, 1 - 1e-9),
    "gc_gradcam_raw14": ("gradcam", {"positive": False}, 1 - 1e-9),
    "legrad_torchcam_cls": ("legrad", {}, 1 - 1e-9),
    "legrad_torchcam_mean": ("legrad", {"readout": "mean"}, 1 - 1e-9),
    "chefer_ta_s0_f64": ("chefer_lrp", {}, 1 - 1e-5),
    "chefer_ta_s1_f64": ("chefer_lrp", {"start_layer": 1}, 1 - 1e-5),
}


@pytest.fixture(scope="module")
def arrays(oracle_dir):
    with np.load(oracle_dir / "inputs.npz") as inputs, np.load(oracle_dir / "maps14.npz") as maps:
        return dict(inputs) | dict(maps)


def cosine(found: np.ndarray, expected: np.ndarray) -> float:
    a, b = (np.asarray(x, dtype=np.float64).ravel() for x in (found, expected))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def explain(arrays, model: nn.Module, pair: str, name: str, **options) -> np.ndarray:
    """The map [h, w] of one pair of image and class."""
    key, target = pair.split("_t")
    images = torch.from_numpy(arrays[f"x/{key}"])[None].to(next(model.parameters()).dtype)
    return create_method(name, model, **options).attribute(images, int(target))[0].sum(0).numpy()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("oracle", ORACLES)
def test_maps_of_the_reference_implementations(arrays, deit_tiny, oracle, pair):
    name, options, least = ORACLES[oracle]
    found = explain(arrays, deit_tiny, pair, name, resolution="patch", **options)
    assert cosine(found, arrays[f"{oracle}/{pair}"]) > least


@pytest.mark.parametrize("pair", QUICK)  # all layers together are compared on all pairs
@pytest.mark.parametrize("readout", ["cls", "mean"])
def test_every_layer_of_legrad(arrays, deit_tiny, readout, pair):
    """In float64, since the record is in float32: its last layer is up to 2.3e-5 of the largest value off."""
    expected = arrays[f"legrad_own_{readout}_perlayer/{pair}"]
    model = copy.deepcopy(deit_tiny).double()
    for layer in (0, 6, 11):
        found = explain(arrays, model, pair, "legrad", resolution="patch", readout=readout, layers=[layer])
        np.testing.assert_allclose(found, expected[layer], rtol=1e-4, atol=3e-5 * expected[layer].max())


def test_full_maps(arrays, deit_tiny, oracle_dir):
    with np.load(oracle_dir / "full_p0_t991.npz") as full:
        for oracle, name, options in (
            ("gc_gradcam", "gradcam", {}),
            ("legrad_official_cls_rawlogit_raw", "legrad", {}),
            ("legrad_official_mean_rawlogit_raw", "legrad", {"readout": "mean"}),
        ):
            assert cosine(explain(arrays, deit_tiny, "p0_t991", name, **options), full[oracle]) > 1 - 1e-6


def test_chefer_lrp_does_not_depend_on_the_precision_of_the_model(arrays, deit_tiny):
    """The reference moves by 7 % on this image when it runs in float32."""
    found = explain(arrays, deit_tiny, "p7_t264", "chefer_lrp", resolution="patch")
    assert cosine(found, arrays["chefer_ta_s0_f64/p7_t264"]) > 1 - 1e-5
    assert cosine(arrays["chefer_ta_s0/p7_t264"], arrays["chefer_ta_s0_f64/p7_t264"]) < 0.95


@pytest.mark.slow
def test_flow_on_a_real_image(arrays, deit_tiny):
    """No more than one unit can reach the class token, and no token sends nothing."""
    found = explain(arrays, deit_tiny, "p0_t991", "attention_flow", resolution="patch")
    assert found.min() > 0
    assert found.max() < 1 + 1e-3


def bcos_network(arrays, stem: list[int] | None) -> nn.Module:
    pytest.importorskip("bcos")
    from bcos.models.vit import SimpleViT
    from bcos.modules import BcosConv2d, BcosLinear, LogitLayer, norms

    with pytest.warns(UserWarning, match="pretrained"):  # the package prefers its own entry points
        network = SimpleViT(
            image_size=7 if stem else 56,
            patch_size=1 if stem else 8,
            num_classes=10,
            dim=48,
            depth=3,
            heads=3,
            mlp_dim=96,
            linear_layer=BcosLinear,
            conv2d_layer=BcosConv2d,
            norm_layer=norms.NoBias(norms.DetachableLayerNorm),
            norm2d_layer=norms.NoBias(norms.DetachableGNLayerNorm2d),
            act_layer=nn.Identity,
            conv_stem=stem,
        )
    model = nn.Sequential(network, LogitLayer(logit_bias=math.log(1 / 9)))
    model.load_state_dict({key[3:]: torch.from_numpy(arrays[key]) for key in arrays if key.startswith("sd/")})
    return model.eval()


@pytest.mark.parametrize(("name", "stem"), [("simplevit", None), ("vitc", [12, 24, 48])])
def test_bcos_networks_explain_themselves(oracle_dir, name, stem):
    with np.load(oracle_dir / f"bcos_{name}.npz") as file:
        arrays = dict(file)
    model = bcos_network(arrays, stem)
    pairs = [key.split("/")[:2] for key in arrays if key.endswith("contribution_map")]
    assert len(pairs) == 4
    for image, target in pairs:
        inputs = torch.from_numpy(arrays[f"{image}/input6"])[None]
        torch.testing.assert_close(model(inputs)[0].detach(), torch.from_numpy(arrays[f"{image}/logits"]))
        found = create_method("bcos", model).attribute(inputs, int(target[1:]))[0]
        expected = inputs[0].numpy() * arrays[f"{image}/{target}/dynamic_linear_weights"]
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        assert cosine(found.sum(0).numpy(), arrays[f"{image}/{target}/contribution_map"]) > 1 - 1e-6
