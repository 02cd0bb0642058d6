"""Gradient methods and relevance propagation against other implementations: captum live, and recorded outputs."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny_models
from dave_vit import create_method

QUICK = ["p0_t991", "pm_t340"]
REST = ["p1_t852", "p3_t781", "p5_t753", "p7_t264"]  # of the recorded ones every second
CLOSE = 1 - 1e-6  # cosine
X, TARGET = tiny_models.images(2), torch.tensor([1, 3])


def agrees(found: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest value."""
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-5)


class TestCaptum:
    @pytest.fixture(params=["vit", "swin", "cnn"])
    def model(self, request) -> nn.Module:
        return tiny_models.FAMILIES[request.param]()

    def test_input_x_gradient(self, model):
        from captum.attr import InputXGradient

        expected = InputXGradient(model).attribute(X.clone().requires_grad_(), TARGET).detach()
        agrees(create_method("input_x_gradient", model).attribute(X, TARGET), expected)

    @pytest.mark.parametrize("absolute", [True, False])
    def test_saliency(self, model, absolute):
        from captum.attr import Saliency

        expected = Saliency(model).attribute(X.clone().requires_grad_(), TARGET, abs=absolute)
        agrees(create_method("saliency", model, absolute=absolute).attribute(X, TARGET), expected)

    @pytest.mark.parametrize("baseline", [0.0, 0.3, torch.tensor([0.1, -0.2, 0.4]).view(3, 1, 1)])
    def test_integrated_gradients(self, model, baseline):
        from captum.attr import IntegratedGradients

        start = torch.as_tensor(baseline).expand_as(X)
        expected, delta = IntegratedGradients(model).attribute(
            X, start, TARGET, n_steps=9, return_convergence_delta=True
        )
        method = create_method("integrated_gradients", model, steps=9, baseline=baseline, chunk=4)
        found = method.attribute(X, TARGET)
        agrees(found, expected)
        scale = model(X).abs().max()
        gap = method.completeness_gap(X, found, TARGET)
        torch.testing.assert_close(gap / scale, delta.double() / scale, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("times_input", [True, False])
    def test_smoothgrad_with_the_same_noise(self, model, times_input, monkeypatch):
        from captum.attr import NoiseTunnel, Saliency

        method = create_method("smoothgrad", model, samples=4, level=0.2, times_input=times_input, chunk=3)
        noise = method.noise(tuple(X.shape[1:]), 0, 4)  # [4, C, H, W]
        for image, target in zip(X, TARGET, strict=True):
            spread = 0.2 * float(image.max() - image.min())
            monkeypatch.setattr(torch, "normal", lambda mean, std, spread=spread: noise * spread)
            tunnel = NoiseTunnel(Saliency(model))
            expected = tunnel.attribute(image[None], nt_samples=4, stdevs=spread, target=int(target), abs=False)
            expected = expected * image if times_input else expected
            agrees(method.attribute(image[None], int(target)), expected)

    @pytest.mark.parametrize("other", ["GuidedBackprop", "Deconvolution"])
    def test_rectifiers(self, other):
        import captum.attr

        model = tiny_models.relu_cnn()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it announces its hooks
            expected = getattr(captum.attr, other)(model).attribute(X.clone().requires_grad_(), TARGET)
        name = {"GuidedBackprop": "guided_backprop", "Deconvolution": "deconvolution"}[other]
        agrees(create_method(name, model).attribute(X, TARGET), expected)


def test_smoothgrad_draws_fresh_normal_noise_for_each_sample():
    noise = create_method("smoothgrad", nn.Flatten(), seed=3).noise((3, 16, 16), 0, 50)
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02
    between = torch.corrcoef(noise.flatten(1)) - torch.eye(50)
    assert between.abs().max() < 0.2
    other = create_method("smoothgrad", nn.Flatten(), seed=4).noise((3, 16, 16), 0, 1)
    assert not torch.equal(other, noise[:1])


def test_integrated_gradients_become_complete():
    model = tiny_models.vit()
    gaps = []
    for steps in (2, 8, 64):
        method = create_method("integrated_gradients", model, steps=steps)
        gaps.append(float(method.completeness_gap(X, method.attribute(X, TARGET), TARGET).abs().max()))
    assert gaps[2] < 1e-4
    assert gaps[2] < gaps[0]


@pytest.mark.slow
def test_fullgrad_of_a_cnn_as_the_gradcam_package_has_it():
    from pytorch_grad_cam import FullGrad
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    model = tiny_models.relu_cnn()
    expected = FullGrad(model, [])(X, [ClassifierOutputTarget(int(target)) for target in TARGET])
    found = create_method("fullgrad", model, biases="conv").explain(X, TARGET).map
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(unit(one), torch.from_numpy(other), rtol=0, atol=1e-4)


def unit(maps: Tensor) -> Tensor:
    return (maps - maps.min()) / (maps.max() - maps.min())


class Recorded:
    """Inputs and outputs of public implementations on real images."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.inputs, self.sums = np.load(folder / "inputs.npz"), np.load(folder / "patchsums_f32.npz")
        entries = json.loads((folder / "index.json").read_text())
        self.pairs = [f"{entry['key']}_t{target}" for entry in entries for target in entry["targets"]]
        self.pairs = [pair for pair in self.pairs if f"x/{pair.split('_t')[0]}" in self.inputs.files]

    def batch(self, pairs) -> tuple[Tensor, Tensor]:
        keys, targets = zip(*(pair.split("_t") for pair in pairs), strict=True)
        images = torch.stack([torch.tensor(self.inputs[f"x/{key}"]) for key in keys])
        return images, torch.tensor([int(target) for target in targets])

    def check(self, name: str, pairs, attribution: Tensor) -> None:
        """Cosine with the recorded array: of the patch sums, and of the whole where it is kept."""
        kept = [pair for pair in pairs if f"{name}/{pair}" in self.sums.files]
        assert kept == (["p0_t991"] if name.endswith("_all") else list(pairs))
        for pair in kept:
            found = attribution[pairs.index(pair)].double()
            patches = found.unflatten(-1, (14, 16)).unflatten(-3, (14, 16)).sum((-3, -1))
            assert cosine(patches, self.sums[f"{name}/{pair}"]) >= CLOSE, (name, pair)
            path = self.folder / f"full_{pair}.npz"
            whole = np.load(path) if path.exists() else {}
            for key in {name, f"{name}_chsum"} & set(whole):
                assert cosine(found, whole[key]) >= CLOSE, (key, pair)


def cosine(found: Tensor, expected: np.ndarray) -> float:
    other = torch.tensor(expected).double()
    found = found.sum(0) if found.ndim > other.ndim else found
    return float(torch.cosine_similarity(found.flatten(), other.flatten(), 0))


@pytest.fixture(scope="module")
def recorded(oracle_dir) -> Recorded:
    return Recorded(oracle_dir)


def gammas(conv: float, linear: float, attention: float) -> dict[str, float]:
    return {"conv_gamma": conv, "linear_gamma": linear, "attention_gamma": attention}


ORACLES = {
    "captum_ixg": ("input_x_gradient", {}),
    "captum_grad": ("saliency", {"absolute": False}),
    "captum_ig": ("integrated_gradients", {"steps": 50}),
    "dave_Wx": ("effective", {}),
    "lxt_cp_plain": ("cp_lrp", gammas(0, 0, 0)),
    "lxt_cp_gamma": ("cp_lrp", gammas(0.25, 0.05, 0)),
    "lxt_cp_gamma_all": ("cp_lrp", gammas(0.25, 0.05, 0.05)),
    "lxt_attn_plain": ("attn_lrp", gammas(0, 0, 0)),
    "lxt_attn_gamma": ("attn_lrp", gammas(0.25, 0.05, 0)),
    "lxt_attn_gamma_all": ("attn_lrp", gammas(0.25, 0.05, 0.05)),
}
QUICK_ORACLES = ["captum_ixg", "captum_grad", "lxt_cp_plain", "lxt_cp_gamma", "lxt_attn_plain", "lxt_attn_gamma"]


@pytest.mark.realdata
@pytest.mark.parametrize("name", QUICK_ORACLES)
def test_recorded_outputs(name, recorded, deit_tiny):
    method, options = ORACLES[name]
    images, target = recorded.batch(QUICK)
    recorded.check(name, QUICK, create_method(method, deit_tiny, **options).attribute(images, target))


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize("name", ORACLES)
def test_more_recorded_outputs(name, recorded, deit_tiny):
    assert len(recorded.pairs) == 10
    few = name == "captum_ig" or name.endswith("_all")  # of fifty passes each, or recorded for this one alone
    pairs = QUICK[:1] if few else [*([] if name in QUICK_ORACLES else QUICK), *REST]
    method, options = ORACLES[name]
    images, target = recorded.batch(pairs)
    recorded.check(name, pairs, create_method(method, deit_tiny, **options).attribute(images, target))


@pytest.mark.realdata
def test_fullgrad_of_convolutions(recorded, deit_tiny):
    check_fullgrad(recorded, deit_tiny, QUICK)


@pytest.mark.slow
@pytest.mark.realdata
def test_fullgrad_of_convolutions_on_more_images(recorded, deit_tiny):
    check_fullgrad(recorded, deit_tiny, REST)


def check_fullgrad(recorded: Recorded, model: nn.Module, pairs) -> None:
    images, target = recorded.batch(pairs)
    maps = create_method("fullgrad", model, biases="conv").explain(images, target).map
    scaled = torch.stack([unit(one) for one in maps])  # the package returns maps from 0 to 1
    recorded.check("gc_fullgrad", pairs, scaled)
