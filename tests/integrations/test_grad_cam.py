"""Drop-ins for pytorch-grad-cam: its README with one changed import, its targets, and its maps as methods."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pytorch_grad_cam import GradCAM, XGradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget, ClassifierOutputTarget

import dave_vit.integrations.grad_cam as ours
from dave_vit import METHODS, create_method
from dave_vit.errors import OptionError, TargetError, UnknownName
from tiny_models import SIZE, drawn, images, relu_cnn, vit

X = images()

# As in the README of pytorch-grad-cam, but for the first import, the untrained weights and the image.
README = """
from dave_vit.integrations.grad_cam import GradCAM, HiResCAM, ScoreCAM, GradCAMPlusPlus, AblationCAM, XGradCAM, \\
  EigenCAM, FullGrad
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from pytorch_grad_cam.utils.image import show_cam_on_image
from torchvision.models import resnet50, ResNet50_Weights

model = resnet50(weights=None)
target_layers = [model.layer4[-1]]
input_tensor = torch.randn(1, 3, 64, 64)
# Note: input_tensor can be a batch tensor with several images!

# We have to specify the target we want to generate the CAM for.
targets = [ClassifierOutputTarget(281)]

# Construct the CAM object once, and then re-use it on many images.
with GradCAM(model=model, target_layers=target_layers) as cam:
  # You can also pass aug_smooth=True and eigen_smooth=True, to apply smoothing.
  grayscale_cam = cam(input_tensor=input_tensor, targets=targets)
  # In this example grayscale_cam has only one image in the batch:
  grayscale_cam = grayscale_cam[0, :]
  visualization = show_cam_on_image(rgb_img, grayscale_cam, use_rgb=True)
  # You can also get the model outputs without having to redo inference
  model_outputs = cam.outputs
"""


def test_the_readme_of_grad_cam_runs_with_one_changed_import():
    names = {"torch": torch, "rgb_img": np.zeros((64, 64, 3), np.float32)}
    exec(README, names)
    assert isinstance(names["cam"], ours.CAM)
    assert names["XGradCAM"] is XGradCAM
    assert names["visualization"].shape == (64, 64, 3)
    assert names["model_outputs"].shape == (1, 1000)
    assert names["model"].training  # as it was before
    assert all(module.training for module in names["model"].modules())


@pytest.mark.parametrize("name", ["dave", "gradcam", "rollout", "input_x_gradient"])
def test_heatmaps_are_between_zero_and_one(name):
    options = {"samples": 3} if name == "dave" else {}
    kind = getattr(ours, METHODS[name].__name__)
    with kind(model=vit(), target_layers=None, **options) as cam:
        found = cam(input_tensor=X, targets=[ClassifierOutputTarget(index) for index in (0, 1, 2)])
    expected = create_method(name, vit(), **options).explain(X, [0, 1, 2]).heatmap
    assert found.dtype == np.float32
    assert found.shape == (3, SIZE, SIZE)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)
    assert 0 <= found.min() < found.max() <= 1


def test_any_function_of_an_output_is_a_target():
    cam = ours.Saliency(vit())
    found = cam(X[:2], [ClassifierOutputSoftmaxTarget(1), lambda output: output[2] ** 2])
    one = create_method("saliency", vit()).explain(X[:1], lambda logits: logits.softmax(1)[:, 1]).heatmap
    other = create_method("saliency", vit()).explain(X[1:2], lambda logits: logits[:, 2] ** 2).heatmap
    np.testing.assert_allclose(found, torch.cat([one, other]).numpy(), rtol=1e-4, atol=1e-6)
    predicted = cam(X)
    np.testing.assert_allclose(predicted, cam(X, [ClassifierOutputTarget(int(row.argmax())) for row in cam.outputs]))
    with pytest.raises(TargetError, match="1 targets for 3 images"):
        cam(X, [ClassifierOutputTarget(1)])
    with pytest.raises(OptionError, match="aug_smooth"):
        cam(X, aug_smooth=True)


def test_maps_of_grad_cam_are_methods():
    model = relu_cnn()
    targets = [ClassifierOutputTarget(index) for index in (0, 1, 2)]
    with GradCAM(model=model, target_layers=[model[5]]) as cam:
        expected = cam(input_tensor=X, targets=targets)
    for layers in ([model[5]], "5", ["5"]):
        found = create_method("grad_cam:GradCAM", model, target_layers=layers).explain(X, [0, 1, 2])
        np.testing.assert_allclose(found.map.numpy(), expected, atol=1e-6)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(UnknownName, match="'grad_cam:GradCam'; did you mean GradCAM"):
        create_method("grad_cam:GradCam", model)


def test_the_default_layer_is_that_of_our_own_grad_cam():
    for model in (vit(), vit(class_token=False, global_pool="avg")):
        theirs = create_method("grad_cam:GradCAM", model).explain(X, [0, 1, 2]).heatmap
        own = create_method("gradcam", model).explain(X, [0, 1, 2]).heatmap
        # both are scaled and enlarged in their own way; they agree on where the evidence is
        pairs = [
            torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] for a, b in zip(theirs, own, strict=True)
        ]
        assert min(pairs) > 0.95
    training = drawn(vit()).train()
    before = [module.training for module in training.modules()]
    create_method("grad_cam:EigenCAM", training).attribute(X, 1)
    assert [module.training for module in training.modules()] == before
