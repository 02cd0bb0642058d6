"""Methods that hide parts of the image, against captum, scikit-learn and the formulas by loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_models
from dave_vit import create_method
from dave_vit.errors import OptionError
from dave_vit.methods.masking import Squares

X, TARGET = tiny_models.images(2, torch.float64), torch.tensor([1, 3])


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return tiny_models.vit().double()


class Probabilities(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).softmax(1)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, (expected / scale).to(found.dtype), rtol=0, atol=tolerance)


class TestOcclusion:
    @pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 4), (10, 7)])
    @pytest.mark.parametrize("score", ["probability", "logit"])
    def test_is_captums(self, vit, window, stride, score):
        from captum.attr import Occlusion

        subject = Probabilities(vit) if score == "probability" else vit
        expected = Occlusion(subject).attribute(
            X, (3, window, window), (3, stride, stride), baselines=0.2, target=TARGET
        )
        options = {"window": window, "stride": stride, "baseline": 0.2, "score": score, "chunk": 5}
        close(create_method("occlusion", vit, **options).attribute(X, TARGET), expected / 3)

    def test_window_by_default_is_two_patches_and_moves_by_one(self, vit):
        both = [
            create_method("occlusion", vit, **sides).attribute(X, TARGET) for sides in ({}, {"window": 16, "stride": 8})
        ]
        assert torch.equal(*both)

    def test_gaps_between_windows_are_refused(self, vit):
        with pytest.raises(OptionError, match="stride is 9 and window is 8"):
            create_method("occlusion", vit, window=8, stride=9)


class TestRISE:
    def test_is_the_mean_of_masks_by_what_is_seen_through_them(self, vit):
        method = create_method("rise", vit, samples=5, shown=0.4, cells=3, chunk=4)
        masks = method.masks((32, 32), 0, 5)
        total = torch.zeros(2, 32, 32, dtype=torch.float64)
        for mask, image in itertools.product(masks, range(2)):
            seen = vit((X[image] * mask)[None]).softmax(1)[0, TARGET[image]]
            total[image] += seen.detach() * mask[0] / 0.4 / 5
        close(method.explain(X, TARGET).map, total)

    def test_masks_are_smooth_random_and_each_its_own(self, vit):
        method = create_method("rise", vit, seed=2, shown=0.3)
        masks = method.masks((224, 200), 0, 60)
        assert masks.shape == (60, 1, 224, 200)
        assert 0 <= masks.min() < masks.max() <= 1
        assert abs(float(masks.mean()) - 0.3) < 0.03
        assert (masks.diff(dim=-1).abs() < 0.05).all()  # a step of a cell of 29 pixels
        assert torch.equal(method.masks((224, 200), 7, 9), masks[7:9])
        between = torch.corrcoef(masks.flatten(1)) - torch.eye(60)
        assert between.abs().max() < 0.6
        assert not torch.equal(create_method("rise", vit, seed=3).masks((224, 200), 0, 1), masks[:1])

    def test_standard_error_is_that_of_the_mean(self, vit):
        method = create_method("rise", vit, samples=40, cells=3)
        found = method.explain(X[:1], 1)
        masks = method.masks((32, 32), 0, 40)
        with torch.no_grad():
            each = vit(X[:1] * masks).softmax(1)[:, 1, None, None] * masks[:, 0] / 0.5
        close(found.standard_error[0], each.std(0) / math.sqrt(40), 1e-3)
        assert found.samples == 40


class TestLIME:
    def test_is_scikit_learns_ridge(self, vit):
        from sklearn.linear_model import Ridge

        method = create_method("lime", vit, samples=30, patch=8, ridge=0.5, width=0.3, seed=4, chunk=7)
        rows = torch.cat([torch.ones(1, 16), method.rows(16)])
        weights = []
        for row in rows:
            distance = 1 - float(F.cosine_similarity(row, torch.ones(16, dtype=torch.float64), 0))
            weights.append(math.sqrt(math.exp(-(distance**2) / 0.3**2)))
        with torch.no_grad():
            masks = F.interpolate(rows.view(-1, 1, 4, 4), (32, 32))
            said = [vit(X[:1] * mask).softmax(1)[0, 1] for mask in masks]
        fitted = Ridge(alpha=0.5).fit(rows.numpy(), np.array(said), sample_weight=weights)
        expected = F.interpolate(torch.tensor(fitted.coef_).view(1, 1, 4, 4) / 64, (32, 32))[0]
        close(method.explain(X[:1], 1).map, expected, 1e-4)

    def test_finds_the_weights_of_a_model_that_is_linear_in_the_squares(self):
        model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 5)).double().eval()
        method = create_method("lime", model, samples=400, patch=8, ridge=1e-6, score="logit")
        contribution = create_method("input_x_gradient", model).attribute(X, TARGET).sum(1)
        squares = F.avg_pool2d(contribution, 8)
        close(F.avg_pool2d(method.explain(X, TARGET).map, 8), squares, 1e-3)


class TestKernelSHAP:
    def values_by_definition(self, model: nn.Module, image: Tensor, target: int) -> Tensor:
        """Shapley values of the four quarters: the mean rise over all orders in which they come in."""

        def worth(shown: set[int]) -> float:
            mask = torch.tensor([float(one in shown) for one in range(4)]).view(1, 1, 2, 2)
            return float(model(image[None] * F.interpolate(mask, (32, 32)))[0, target])

        values = torch.zeros(4, dtype=torch.float64)
        for order in itertools.permutations(range(4)):
            for place, one in enumerate(order):
                values[one] += (worth({*order[: place + 1]}) - worth({*order[:place]})) / 24
        return values

    def test_exact_where_all_combinations_fit(self, vit):
        found = create_method("kernel_shap", vit, samples=14, patch=16, chunk=3).explain(X, TARGET).map
        with torch.no_grad():
            for image, target, values in zip(X, TARGET, F.avg_pool2d(found, 16) * 256, strict=True):
                close(values.flatten(), self.values_by_definition(vit, image, int(target)), 1e-4)

    def test_sums_to_the_rise_from_nothing(self, vit):
        found = create_method("kernel_shap", vit, samples=20, patch=8, baseline=0.3).attribute(X, TARGET)
        with torch.no_grad():
            rise = (vit(X) - vit(torch.full_like(X, 0.3))).gather(1, TARGET[:, None])[:, 0]
        close(found.sum((1, 2, 3)), rise)

    def test_drawn_combinations_come_near_to_the_exact_values(self, vit):
        exact = create_method("kernel_shap", vit, samples=512, patch=11).explain(X, TARGET).map  # 9 squares
        drawn = create_method("kernel_shap", vit, samples=300, patch=11).explain(X, TARGET).map
        assert not torch.equal(exact, drawn)
        close(drawn, exact, 0.1)

    def test_is_captums_regression_on_the_same_combinations(self, vit):
        """captum holds the two ends by weights of a million, instead of exactly."""
        from captum._utils.models.linear_model import SkLearnLinearRegression
        from captum.attr import LimeBase

        method = create_method("kernel_shap", vit, samples=60, patch=8, seed=5)
        rows, weights = method.rows(16)
        ends = torch.stack([torch.zeros(16), torch.ones(16)]).double()
        table = {tuple(row.tolist()): float(weight) for row, weight in zip(rows, weights, strict=True)}
        every = iter([*rows, *ends])

        def shown(row, image, **options):
            return image * F.interpolate(row.view(1, 1, 4, 4), (32, 32))

        def similar(original, changed, row, **options):
            return torch.tensor([table.get(tuple(row[0].tolist()), 1e6)])

        lime = LimeBase(
            vit,
            SkLearnLinearRegression(),
            similar,
            lambda original, **options: next(every)[None],
            perturb_interpretable_space=True,
            from_interp_rep_transform=lambda row, image, **options: (
                image * F.interpolate(row.view(1, 1, 4, 4), (32, 32))
            ),
            to_interp_rep_transform=None,
        )
        expected = lime.attribute(X[:1], target=1, n_samples=62)
        close(F.avg_pool2d(method.explain(X[:1], 1).map, 8).flatten() * 64, expected.flatten(), 1e-3)


class TestSquares:
    def test_edges_are_cut(self):
        squares = Squares(12, (32, 20))
        assert squares.grid == (3, 2)
        masks = squares.masks(torch.eye(6))
        assert torch.equal(masks.sum(0), torch.ones(32, 20))
        assert masks[5].nonzero().amin(0).tolist() == [24, 12]
        values = torch.arange(1.0, 7.0)
        torch.testing.assert_close((squares.spread(values) * masks).sum((1, 2)), values)

    def test_default_is_the_models_patches_or_a_fourteenth(self, vit):
        assert Squares.of(vit, X, None).side == 8
        assert Squares.of(tiny_models.swin(), torch.zeros(1, 3, 224, 224), None).side == 16
        assert Squares.of(tiny_models.relu_cnn(), torch.zeros(1, 3, 28, 56), None).side == 2
