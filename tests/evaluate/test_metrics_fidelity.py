"""Infidelity, sensitivity-n, ROAD, regions, average precision and random logits against other implementations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dave_vit.errors import InputError
from dave_vit.metrics import Case, create_metric, deletion
from dave_vit.metrics.fidelity import infidelity, masked_sums, random_pixels, random_squares, score_drops, sensitivity
from dave_vit.metrics.localization import average_precision
from dave_vit.metrics.perturbation import Perturbation, region_means
from dave_vit.metrics.removal import FRACTIONS, impute, road, square_regions
from dave_vit.metrics.stability import cascade, similarity

DRAW = torch.Generator().manual_seed(5)
X = torch.randn(3, 3, 20, 24, generator=DRAW, dtype=torch.float64)
MAPS = torch.randn(3, 20, 24, generator=DRAW, dtype=torch.float64)
TARGET = torch.tensor([0, 3, 1])


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Tiny().double().eval()


def contribution(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    leaf = inputs.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(leaf).gather(1, target[:, None]).sum(), leaf)
    return (slope * inputs).sum(1)


def case_of(model: nn.Module, maps: Tensor) -> Case:
    regions = torch.zeros(3, 20, 24, dtype=torch.bool)
    return Case(model, X, TARGET, maps, regions, contribution, (-2.0, -1.9, -1.8))


class TestInfidelity:
    @pytest.mark.parametrize("scaled", [True, False])
    def test_is_captums(self, model, scaled):
        from captum.metrics import infidelity as captums

        masks = random_squares(6, (20, 24), seed=2)
        every = masks.repeat(3, 1, 1)[:, None].to(X.dtype)  # captum repeats each image for its samples
        whole = MAPS[:, None].expand_as(X)  # captum sums over channels: the map counts in the first one only
        first = torch.tensor([1.0, 0, 0], dtype=X.dtype).view(3, 1, 1)

        def perturb(inputs: Tensor) -> tuple[Tensor, Tensor]:
            return (every * first).expand_as(inputs), inputs * (1 - every)

        expected = captums(model, perturb, X, whole, target=TARGET, n_perturb_samples=6, normalize=scaled)
        values = infidelity(masked_sums(MAPS, masks), score_drops(model, X, TARGET, masks), scaled=scaled)
        torch.testing.assert_close(values, expected)

    def test_of_a_linear_model_is_zero_for_its_contributions_alone(self):
        linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 20 * 24, 5)).double()
        exact = create_metric("infidelity", samples=9, scaled=False)
        own = exact.score(case_of(linear, contribution(linear, X, TARGET))).values
        torch.testing.assert_close(own, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
        other = exact.score(case_of(linear, MAPS)).values
        assert (other > 0.01).all()

    def test_unit_of_the_map_does_not_count(self, model):
        metric = create_metric("infidelity", samples=9)
        both = [metric.score(case_of(model, scale * MAPS)).values for scale in (1, 100)]
        torch.testing.assert_close(*both)

    def test_squares_are_random_and_within_the_image(self):
        masks = random_squares(40, (28, 56), seed=3)
        sides = [mask.any(1).sum() for mask in masks]
        assert all(mask.sum() == side**2 for mask, side in zip(masks, sides, strict=True))
        assert {2, 14} <= {int(side) for side in sides} <= set(range(2, 15))
        assert torch.equal(random_squares(3, (28, 56), seed=3), masks[:3])


class TestSensitivityN:
    def test_is_the_correlation_by_numpy(self, model):
        metric = create_metric("sensitivity_n", samples=8, sizes=2, of="probability")
        scores = metric.score(case_of(model, MAPS))
        assert scores.at == pytest.approx((0.01, 0.8))
        for column, share in enumerate(scores.at):
            masks = random_pixels(share, 8, (20, 24))
            assert masks.flatten(1).sum(1).tolist() == [round(share * 480)] * 8
            for image in range(3):
                claimed, fallen = [], []
                for mask in masks:
                    claimed.append(float(MAPS[image][mask].sum()))
                    hidden = X[image : image + 1].clone()
                    hidden[:, :, mask] = 0
                    before, after = (
                        model(seen).softmax(1)[0, TARGET[image]] for seen in (X[image : image + 1], hidden)
                    )
                    fallen.append(float((before - after).detach()))
                expected = np.corrcoef(claimed, fallen)[0, 1]
                assert float(scores.curves[image, column]) == pytest.approx(expected)
        torch.testing.assert_close(scores.values, scores.curves.mean(1))

    def test_contributions_of_a_linear_model_are_perfect(self):
        linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 20 * 24, 5)).double()
        scores = create_metric("sensitivity_n", samples=6, sizes=3).score(
            case_of(linear, contribution(linear, X, TARGET))
        )
        torch.testing.assert_close(scores.curves, torch.ones(3, 3, dtype=torch.float64))

    def test_a_constant_map_has_no_score(self, model):
        assert sensitivity(torch.ones(1, 4), torch.rand(1, 4)).isnan().all()
        metric, case = create_metric("sensitivity_n", samples=3, sizes=1), case_of(model, torch.zeros_like(MAPS))
        assert metric.score(case).values.isnan().all()
        assert metric.reason(case, 0) == "map is constant"


class TestROAD:
    @pytest.mark.parametrize("share", [0.2, 0.9])
    def test_pixels_are_filled_in_as_in_the_package(self, share):
        from pytorch_grad_cam.metrics.road import NoisyLinearImputer

        draw = torch.rand(3, 20, 24, generator=torch.Generator().manual_seed(1))
        removed = draw < share
        removed[0, 3:15, 2:20] = True  # a large hole
        imputed = impute(X, removed)
        for image, gone, filled in zip(X, removed, imputed, strict=True):
            expected = NoisyLinearImputer(noise=0.0)(image.float(), (~gone).float())
            torch.testing.assert_close(filled.float(), expected, rtol=0, atol=1e-3)
            assert torch.equal(filled[:, ~gone], image[:, ~gone])

    def test_what_is_filled_in_is_the_mean_around_it(self):
        removed = torch.zeros(3, 20, 24, dtype=torch.bool)
        removed[:, 7, 9] = True
        around = X[:, :, 6:9, 8:11]
        weights = torch.tensor([[1, 2, 1], [2, 0, 2], [1, 2, 1]], dtype=X.dtype) / 12
        torch.testing.assert_close(impute(X, removed)[:, :, 7, 9], (around * weights).sum((2, 3)))
        flat = torch.full_like(X, 0.7)
        torch.testing.assert_close(impute(flat, MAPS > -1), flat, rtol=0, atol=1e-4)

    def test_curves_remove_what_the_map_says(self, model):
        fractions = (0.3, 0.6)
        curve = road(model, X, MAPS, TARGET, Perturbation(fractions, "most"), noise=0.0)
        for column, fraction in enumerate(fractions):
            for image in range(3):
                count = round(fraction * 480)
                removed = torch.zeros(480, dtype=torch.bool)
                removed[MAPS[image].flatten().argsort(descending=True)[:count]] = True
                seen = impute(X[image : image + 1], removed.view(1, 20, 24))
                torch.testing.assert_close(curve[image, column], model(seen).softmax(1)[0, TARGET[image]].float())

    def test_score_is_least_against_most(self, model):
        case = case_of(model, MAPS)
        scores = create_metric("road", noise=0.1, seed=4).score(case)
        orders = (Perturbation(FRACTIONS, order, seed=4) for order in ("least", "most"))
        least, most = (road(model, X, MAPS, TARGET, order, noise=0.1) for order in orders)
        torch.testing.assert_close(scores.curves, (least - most) / 2)
        torch.testing.assert_close(scores.values, ((least - most) / 2).mean(1))
        turned = create_metric("road", noise=0.0).score(case_of(model, -MAPS)).values
        torch.testing.assert_close(turned, -create_metric("road", noise=0.0).score(case).values)


class TestRegions:
    def test_curve_by_loops(self, model):
        regions = square_regions((20, 24), 4)  # sides of 5 pixels, cut at the right
        assert int(regions.max()) == 19
        perturbation = Perturbation((0.0, 0.25, 1.0), "most", "mean")
        curve = deletion(model, X, MAPS, TARGET, perturbation, regions)
        for image in range(3):
            means = {int(one): float(MAPS[image][regions == one].mean()) for one in regions.unique()}
            order = sorted(means, key=means.get, reverse=True)
            for column, count in enumerate((0, 5, 20)):
                seen = X[image].clone()
                for one in order[:count]:
                    seen[:, regions == one] = X[image].mean((1, 2))[:, None]
                torch.testing.assert_close(curve[image, column], model(seen[None]).softmax(1)[0, TARGET[image]].float())
        expected = torch.tensor([MAPS[0][regions == one].mean() for one in range(20)], dtype=MAPS.dtype)
        torch.testing.assert_close(region_means(MAPS, regions)[0], expected)

    def test_score_is_the_area_over_the_curve(self, model):
        scores = create_metric("irof", regions=4, steps=4).score(case_of(model, MAPS))
        assert torch.equal(scores.curves[:, 0], torch.ones(3))
        expected = 1 - np.trapezoid(scores.curves.numpy(), scores.at, axis=1)
        np.testing.assert_allclose(scores.values.numpy(), expected, rtol=1e-5)

    def test_equal_regions_go_by_lot(self, model):
        maps = torch.zeros_like(MAPS)
        both = [create_metric("irof", regions=4, seed=seed).score(case_of(model, maps)).curves for seed in (0, 1)]
        assert not torch.equal(*both)


class TestAveragePrecision:
    def test_is_scikit_learns(self):
        from sklearn.metrics import average_precision_score

        maps = torch.randint(-3, 9, (6, 12, 10), generator=torch.Generator().manual_seed(2)).float()  # many are equal
        maps[5] = torch.randn(12, 10, generator=torch.Generator().manual_seed(2))
        regions = torch.rand(6, 12, 10, generator=torch.Generator().manual_seed(3)) < 0.3
        expected = [average_precision_score(r.flatten(), m.flatten()) for r, m in zip(regions, maps, strict=True)]
        np.testing.assert_allclose(average_precision(maps, regions).numpy(), expected)

    def test_ends(self):
        regions = torch.zeros(4, 4, 4, dtype=torch.bool)
        regions[:3, :2] = True
        maps = torch.stack([regions[0].float(), torch.ones(4, 4), torch.full((4, 4), torch.nan), torch.ones(4, 4)])
        values = average_precision(maps, regions)
        assert values[:2].tolist() == [1.0, 0.5]  # a map that knows nothing has the region's share
        assert values[2:].isnan().all()
        with pytest.raises(InputError, match="of type bool"):
            average_precision(maps, regions.float())


class TestRandomisation:
    def test_random_logit_compares_with_another_class(self, model):
        own = contribution(model, X, TARGET)
        scores = create_metric("random_logit", seed=3).score(case_of(model, own))
        candidates = [similarity(own, contribution(model, X, (TARGET + ahead) % 5)) for ahead in range(1, 5)]
        assert any(torch.equal(scores.values, candidate) for candidate in candidates)

    def test_random_logit_counts_the_classes_of_a_model_once(self):
        model = Tiny().double()
        case, metric, passes = case_of(model, contribution(model, X, TARGET)), create_metric("random_logit"), []
        case = replace(case, explain=lambda model, inputs, target: case.maps)
        model.register_forward_hook(lambda module, given, made: passes.append(len(made)))
        for _ in range(3):
            metric.score(case)
        assert passes == [1]

    def test_a_map_of_no_class_fails(self, model):
        case = case_of(model, X.abs().sum(1))
        blind = Case(case.model, X, TARGET, case.maps, case.regions, lambda model, inputs, target: inputs.abs().sum(1))
        torch.testing.assert_close(create_metric("random_logit").score(blind).values, torch.ones(3, dtype=X.dtype))

    def test_layers_by_themselves(self, model):
        """Stage by stage other parameters are random, and all are as they were in between."""
        before = {name: value.clone() for name, value in model.named_parameters()}
        changed = []
        for shuffled in cascade(model, stages=2, seed=1, layers="independent"):
            changed.append({n for n, value in shuffled.named_parameters() if not torch.equal(value, before[n])})
        assert changed == [{"head.weight", "head.bias"}, {"stem.weight", "stem.bias"}]
        assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
        last = [value.clone() for value in list(cascade(model, stages=2, seed=1))[-1].parameters()]
        assert all(not torch.equal(value, old) for value, old in zip(last, before.values(), strict=True))

    def test_sanity_takes_either(self, model):
        case = case_of(model, contribution(model, X, TARGET))
        both = [create_metric("sanity", stages=2, layers=one).score(case) for one in ("cascading", "independent")]
        assert torch.equal(both[0].curves[:, 0], both[1].curves[:, 0])  # the head goes first in both
        assert not torch.equal(both[0].curves[:, 1], both[1].curves[:, 1])
