"""Rivals of a reviewer's list against their formulas in float64, and against the grad-cam package where it has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_method_cams import scaled
from torch import Tensor, nn

import tiny_models
from dave_vit import Contrast, create_method
from dave_vit.engine.observation import observe
from dave_vit.errors import InputError, OptionError, UnsupportedOperator
from dave_vit.methods.patch_values import fit_convex

X = tiny_models.images(dtype=torch.float64)
TARGET = [0, 1, 2]


@pytest.fixture
def vit() -> nn.Module:
    return tiny_models.vit().double()


@pytest.fixture
def cnn() -> nn.Module:
    return tiny_models.relu_cnn().double()


def grids(name: str, model: nn.Module, target=TARGET, **options) -> Tensor:
    return create_method(name, model, resolution="patch", **options).attribute(X, target)[:, 0]


def normed_tokens(model: nn.Module) -> Tensor:
    """Features of the ViT, ``[B, D, h, w]``: the normed tokens that enter the last attention, without the first."""
    kept = []
    handle = model.blocks[-1].norm1.register_forward_hook(lambda module, args, output: kept.append(output))
    with handle, torch.no_grad():
        model(X)
    return kept[0][:, 1:].unflatten(1, (4, 4)).movedim(-1, 1)


class TestEigenCAM:
    @pytest.mark.parametrize("centred", [False, True])
    def test_is_the_first_component(self, vit, centred):
        found = grids("eigencam", vit, positive=False, centred=centred)
        for image, grid in zip(normed_tokens(vit).flatten(2).mT.numpy(), found.numpy(), strict=True):
            image = image - image.mean(0) if centred else image
            values, vectors = np.linalg.eigh(image.T @ image)
            expected = (image @ vectors[:, np.argmax(values)]).reshape(4, 4)
            expected *= np.sign(expected.flat[np.abs(expected).argmax()])
            np.testing.assert_allclose(grid, expected, atol=1e-9)

    def test_as_in_the_package(self, vit):
        from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection

        found = grids("eigencam", vit, positive=False, centred=True)
        package = torch.from_numpy(get_2d_projection(normed_tokens(vit).numpy()))
        agree = (found * package).flatten(1).sum(1).sign().float()[:, None, None]  # its sign is arbitrary
        torch.testing.assert_close(found.float(), package * agree, rtol=1e-4, atol=1e-5)

    def test_of_a_cnn(self, cnn):
        assert grids("eigencam", cnn).amin() >= 0  # features after a ReLU have one sign


class TestAblationCAM:
    def test_is_the_share_of_the_logit_that_a_channel_carries(self, vit):
        values, head = normed_tokens(vit), vit(X).detach()
        expected = torch.zeros(3, 4, 4, dtype=torch.float64)
        for channel in range(values.shape[1]):

            def ablate(module, args, output, channel=channel):
                output = output.clone()
                output[..., channel] = 0
                return output

            with vit.blocks[-1].norm1.register_forward_hook(ablate), torch.no_grad():
                without = vit(X)
            for image, target in enumerate(TARGET):
                weight = (head[image, target] - without[image, target]) / head[image, target]
                expected[image] += weight * values[image, channel]
        torch.testing.assert_close(grids("ablationcam", vit, positive=False), expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(grids("ablationcam", vit), expected.clamp(min=0), rtol=1e-6, atol=1e-9)

    def test_as_in_the_package(self):
        from pytorch_grad_cam import AblationCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        model, images = tiny_models.relu_cnn(), X.float()
        with AblationCAM(model, [model[5]]) as cam:
            package = torch.from_numpy(cam(images, [ClassifierOutputTarget(index) for index in TARGET]))
        found = create_method("ablationcam", model).attribute(images, TARGET).sum(1)
        torch.testing.assert_close(scaled(found), package, rtol=1e-3, atol=1e-3)

    def test_of_features_that_are_computed_in_place(self):
        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem, self.conv = nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 4, 1)
                self.act, self.head = nn.ReLU(inplace=True), nn.Linear(4, 5)

            def features(self, x):
                x = self.stem(x)
                y = self.conv(x)
                y += x
                return self.act(y)

            def forward(self, x):
                return self.head(self.features(x).mean((2, 3)))

        model = Residual().double()
        values = model.features(X).detach()  # [b, D, h, w]
        own = model.head.weight[TARGET] * values.mean((2, 3))  # what each channel adds to the logit
        weights = own / model(X).gather(1, torch.tensor(TARGET)[:, None])
        expected = torch.einsum("bd,bdhw->bhw", weights, values).detach()
        torch.testing.assert_close(grids("ablationcam", model, positive=False), expected)

    @pytest.mark.parametrize("family", ["torchvision", "cnn"])
    def test_leaves_the_model_as_it_was(self, family):
        model, images = tiny_models.FAMILIES[family](), X.float()
        before = model(images)
        found = create_method("ablationcam", model, chunk=5).attribute(images, TARGET)
        torch.testing.assert_close(found, create_method("ablationcam", model).attribute(images, TARGET))
        assert torch.equal(before, model(images))
        assert not any(module._forward_hooks for module in model.modules())

    def test_refuses_features_that_no_module_returns(self):
        class Functional(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.head = nn.Conv2d(3, 4, 8, 8), nn.Linear(4, 5)

            def forward(self, x):
                return self.head((self.conv(x) * 2).relu().mean((2, 3)))

        with pytest.raises(UnsupportedOperator, match="no module of this model returns the features"):
            create_method("ablationcam", Functional()).attribute(X.float(), 0)


class TestFinerCAM:
    def test_is_gradcam_of_the_weighted_differences(self, vit):
        logits = vit(X).detach()
        for image, target in enumerate(TARGET):
            similar = [int(i) for i in (logits[image] - logits[image, target]).abs().argsort() if int(i) != target][:3]

            def difference(output, target=target, similar=similar):
                weights = output.softmax(1)[:, similar]
                return (weights * (output[:, [target]] - 0.6 * output[:, similar])).sum(1) / weights.sum(1)

            expected = create_method("gradcam", vit, resolution="patch").attribute(X[image : image + 1], difference)
            found = grids("finercam", vit, strength=0.6)[image]
            torch.testing.assert_close(found, expected[0, 0], rtol=1e-6, atol=1e-12)

    def test_as_in_the_package(self, vit):
        from pytorch_grad_cam import FinerCAM

        with torch.no_grad():
            vit.head.weight.mul_(30.0)
        layout = lambda tokens: tokens[:, 1:].unflatten(1, (4, 4)).movedim(-1, 1)  # noqa: E731
        with FinerCAM(vit, [vit.blocks[-1].norm1], layout) as cam:
            package = torch.from_numpy(cam(X))
        found = create_method("finercam", vit).attribute(X).sum(1)
        torch.testing.assert_close(scaled(found).float(), package, rtol=1e-3, atol=1e-3)

    def test_contrasts_and_strength_zero_are_gradcam(self, vit):
        contrast = Contrast(TARGET, 3)
        assert torch.equal(grids("finercam", vit, contrast), grids("gradcam", vit, contrast))
        torch.testing.assert_close(grids("finercam", vit, strength=0.0), grids("gradcam", vit))
        with pytest.raises(OptionError, match="strength"):
            create_method("finercam", vit, strength=-1.0)


class TestExpectedGradients:
    def test_is_the_mean_of_gradients_times_differences(self, vit):
        method = create_method("expected_gradients", vit, samples=5, seed=2, references=X[1:], chunk=2)
        total = torch.zeros_like(X)
        for reference, place in zip(*method.draw(X.shape[1:], 0, 5), strict=True):
            point = (reference + place.double() * (X - reference)).requires_grad_()
            scores = vit(point)[torch.arange(3), torch.tensor(TARGET)]
            total += torch.autograd.grad(scores.sum(), point)[0] * (X - reference) / 5
        torch.testing.assert_close(method.attribute(X, TARGET), total, rtol=1e-6, atol=1e-9)

    def test_references_and_places_are_drawn_evenly(self):
        images = torch.arange(4.0).view(4, 1, 1, 1)
        method = create_method("expected_gradients", nn.Identity(), samples=4000, references=images)
        references, places = method.draw((1, 1, 1), 0, 4000)
        assert references.flatten().long().bincount().min() > 900
        assert abs(float(references.mean()) - 1.5) < 0.1
        assert abs(float(places.mean()) - 0.5) < 0.02
        assert abs(float(places.var()) - 1 / 12) < 0.01
        assert abs(float(torch.stack([references.flatten(), places]).corrcoef()[0, 1])) < 0.05

    def test_sums_to_the_difference_of_scores(self):
        linear = nn.Sequential(nn.Flatten(), nn.Linear(X[0].numel(), 5)).double()
        method = create_method("expected_gradients", linear, samples=3, references=X[2:])
        logits = linear(X).detach()
        torch.testing.assert_close(method.attribute(X, 0).flatten(1).sum(1), logits[:, 0] - logits[2, 0])

    def test_references_of_another_shape_are_refused(self, vit):
        with pytest.raises(InputError, match=r"references have shape \(3, 3, 16, 16\); give images \[R, 3, 32, 32\]"):
            create_method("expected_gradients", vit, references=X[..., ::2, ::2]).attribute(X, 0)


def test_beyond_intuition_as_published(vit):
    """Slow and plain: heads weighted by E|A^T dA|, R = R + A R, times the positive mean gradient of the last one."""
    steps, expected = 3, torch.zeros(3, 4, 4, dtype=torch.float64)
    for image, target in enumerate(TARGET):
        x = X[image : image + 1]
        with observe(vit, x) as observed:
            matrices = [each.matrix[0] for each in observed.attention]
            slopes = torch.autograd.grad(observed.logits[0, target], [each.matrix for each in observed.attention])
        joint = torch.eye(17, dtype=torch.float64)
        for matrix, slope in zip(matrices, slopes, strict=True):
            importance = torch.stack([(a.T @ g).abs().mean() for a, g in zip(matrix, slope[0], strict=True)])
            joint = joint + sum(i * a for i, a in zip(importance / importance.sum(), matrix, strict=True)) @ joint
        total = 0
        for alpha in np.linspace(0, 1, steps):
            with observe(vit, x * alpha) as observed:
                total = total + torch.autograd.grad(observed.logits[0, target], [observed.attention[-1].matrix])[0][0]
        feedback = (total / steps).clamp(min=0).mean(0)
        expected[image] = (feedback * joint)[0, 1:].detach().reshape(4, 4)
    found = grids("beyond_intuition", vit, steps=steps, start_layer=0, chunk=2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    with pytest.raises(OptionError, match="start_layer is 9"):
        grids("beyond_intuition", vit, steps=steps, start_layer=9)


class TestMDA:
    def test_finds_the_order_and_the_magnitudes(self, vit):
        """Slow and plain, patch by patch, for four patches: all of them are tried in every step."""
        method = create_method("mda", vit, patch=16, chunk=3)
        found = method.attribute(X[:1], 1).sum(1)[0]
        blurred, black = torch.nn.functional.avg_pool2d(X[:1], 31, 1, 15), torch.zeros_like(X[:1])
        cells = [(slice(16 * (i // 2), 16 * (i // 2) + 16), slice(16 * (i % 2), 16 * (i % 2) + 16)) for i in range(4)]

        def score(shown, background):
            image = background.clone()
            for index in shown:
                image[..., cells[index][0], cells[index][1]] = X[:1, ..., cells[index][0], cells[index][1]]
            return vit(image).softmax(1)[0, 1].item()

        def grow(chosen, left, background, sign, stop=lambda value: False):
            chosen, left = list(chosen), list(left)
            while left:
                best = max(left, key=lambda index: sign * score([*chosen, index], background))
                chosen.append(best)
                left.remove(best)
                if stop(score(chosen, background)):
                    break
            return chosen

        low, high = score([], blurred), score(range(4), blurred)
        first = grow([], range(4), blurred, 1, lambda value: (value - low) / abs(high - low) >= 0.9)
        order = first + grow([], [i for i in range(4) if i not in first], black, -1)[::-1]
        insertion = [score(order[:n], blurred) for n in range(5)]
        deletion = [score(order[n:], black) for n in range(5)]
        rising = np.maximum.accumulate(np.clip((np.array(insertion) - low) / abs(high - low), 0, 1))
        span = abs(deletion[0] - deletion[-1])
        falling = np.minimum.accumulate(np.clip((np.array(deletion) - deletion[-1]) / span, 0, 1))
        slopes = -np.diff(fit_convex(torch.from_numpy((1 - rising + falling) / 2)).numpy())
        values = np.zeros(4)
        values[order] = [slope / 256 + slope * (4 - i) / 4 for i, slope in enumerate(slopes, 1)]
        grid = torch.from_numpy(values).view(1, 1, 2, 2)
        expected = torch.nn.functional.interpolate(grid, (32, 32), mode="bilinear")[0, 0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)

    def test_the_fit_is_the_nearest_falling_convex_curve(self):
        from scipy.optimize import minimize

        draws = torch.rand(9, generator=torch.Generator().manual_seed(3), dtype=torch.float64).cumsum(0)
        curve = (1 - (draws - draws[0]) / (draws[-1] - draws[0])).numpy()
        constraints = [
            {"type": "ineq", "fun": lambda x: np.diff(x, 2)},
            {"type": "ineq", "fun": lambda x: -np.diff(x)},
            {"type": "eq", "fun": lambda x: x[[0, -1]] - curve[[0, -1]]},
        ]
        options = {"maxiter": 500, "ftol": 1e-14}
        line = np.linspace(curve[0], curve[-1], len(curve))
        best = minimize(lambda x: ((x - curve) ** 2).sum(), line, constraints=constraints, options=options)
        np.testing.assert_allclose(fit_convex(torch.from_numpy(curve)).numpy(), best.x, atol=1e-4)

    def test_density(self, vit):
        sparse, half, dense = (
            create_method("mda", vit, patch=16, density=share).attribute(X[:1], 1) for share in (0.0, 0.5, 1.0)
        )
        torch.testing.assert_close(half, (sparse + dense) / 2)
        with pytest.raises(OptionError, match="density is 2"):
            create_method("mda", vit, density=2)
