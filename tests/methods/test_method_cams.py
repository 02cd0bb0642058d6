"""Class activation maps against the grad-cam package, and against the formulas by slow derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tiny_models
from dave_vit import create_method

X = tiny_models.images()
TARGET = [0, 1, 2]
PACKAGE = {
    "gradcam_plus_plus": "GradCAMPlusPlus",
    "layercam": "LayerCAM",
    "hirescam": "HiResCAM",
    "scorecam": "ScoreCAM",
}


def sharp(family: str) -> nn.Module:
    """A model with large gradients, beside which the package's epsilon of 1e-6 does not count."""
    model = tiny_models.FAMILIES[family]()
    head = model.head if family == "vit" else model[-1]
    with torch.no_grad():
        head.weight.mul_(300.0)
    return model


def package(name: str, model: nn.Module) -> Tensor:
    """Maps from 0 to 1, as the package gives them."""
    import pytorch_grad_cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    is_vit = hasattr(model, "blocks")
    layer = model.blocks[-1].norm1 if is_vit else model[5]
    picture = (lambda tokens: tokens[:, 1:].unflatten(1, (4, 4)).movedim(-1, 1)) if is_vit else None
    with getattr(pytorch_grad_cam, PACKAGE[name])(model, [layer], picture) as cam:
        return torch.from_numpy(cam(X, [ClassifierOutputTarget(index) for index in TARGET]))


def scaled(maps: Tensor) -> Tensor:
    low, high = (getattr(maps.flatten(1), side)(1)[:, None, None] for side in ("amin", "amax"))
    return (maps - low) / torch.where(high > low, high - low, 1)  # a map that is all zero stays so


@pytest.mark.parametrize("family", ["vit", "cnn"])
@pytest.mark.parametrize("name", ["gradcam_plus_plus", "layercam", "hirescam"])
def test_gradients_as_in_the_package(name, family):
    model = sharp(family)
    grids = create_method(name, model, positive=True, resolution="patch").attribute(X, TARGET)
    found = torch.nn.functional.interpolate(grids, (32, 32), mode="bilinear")[:, 0]
    torch.testing.assert_close(found, create_method(name, model, positive=True).attribute(X, TARGET).sum(1))
    torch.testing.assert_close(scaled(found), package(name, model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["vit", "cnn"])
def test_scores_as_in_the_package(family, monkeypatch):
    """The package enlarges its masks with aligned corners, the authors' code and this one do not."""
    monkeypatch.setattr(nn, "UpsamplingBilinear2d", lambda size: nn.Upsample(size, mode="bilinear"))
    model = tiny_models.FAMILIES[family]()
    found = create_method("scorecam", model, chunk=7).attribute(X, TARGET).sum(1)
    torch.testing.assert_close(scaled(found), package("scorecam", model), rtol=1e-3, atol=1e-3)


def features_of(model: nn.Module) -> Tensor:
    return model[:6](X).detach()  # [B, D, h, w], after the last ReLU of the small CNN


def test_weights_of_plus_plus_are_derivatives_of_the_exponential():
    """Eq. (19) with true second and third derivatives, element by element, where the head is linear."""
    model = tiny_models.relu_cnn().double()
    held = model[:6](X.double()).detach()
    image, target = held[0], TARGET[0]

    def rise(change: Tensor) -> Tensor:
        """exp(S) with the features changed by one number each."""
        return model[6:]((image + change)[None])[0, target].exp()

    zero = torch.zeros_like(image, requires_grad=True)
    (first,) = torch.autograd.grad(rise(zero), zero, create_graph=True)
    weights = torch.zeros(len(image), dtype=image.dtype)
    for place in torch.ones_like(image).nonzero().tolist():
        at = tuple(place)
        (second,) = torch.autograd.grad(first[at], zero, create_graph=True)
        (third,) = torch.autograd.grad(second[at], zero, retain_graph=True)
        below = 2 * second[at] + image[at[0]].sum() * third[at]
        weights[at[0]] += (second[at] / below * first[at].clamp(min=0)).detach()
    expected = (weights[:, None, None] * image).sum(0).clamp(min=0)
    found = create_method("gradcam_plus_plus", model, resolution="patch").attribute(X.double(), TARGET)[0, 0]
    # The method leaves out exp(S), one factor of the whole map.
    torch.testing.assert_close(found * rise(torch.zeros_like(image)).detach(), expected)


def test_hirescam_sums_to_the_logit_where_the_head_is_linear():
    model = tiny_models.relu_cnn()
    maps = create_method("hirescam", model, resolution="patch").attribute(X, TARGET)
    expected = model(X).detach()[range(3), TARGET] - model[-1].bias.detach()[TARGET]
    torch.testing.assert_close(maps.sum((1, 2, 3)), expected, rtol=1e-4, atol=1e-5)


def test_layercam_is_place_by_place():
    model = tiny_models.relu_cnn()
    held = features_of(model).requires_grad_()
    (slope,) = torch.autograd.grad(model[6:](held)[range(3), TARGET].sum(), held)
    expected = (slope.clamp(min=0) * held).sum(1).detach()
    found = create_method("layercam", model, resolution="patch").attribute(X, TARGET)
    torch.testing.assert_close(found[:, 0], expected)
