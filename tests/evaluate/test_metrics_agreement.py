"""SaCo, single deletion, complexity and sparseness against loops that follow their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy, spearmanr
from torch import Tensor, nn

from dave_vit.metrics import Case, create_metric
from dave_vit.metrics.fidelity import saco
from dave_vit.metrics.stability import complexity, sparseness
from tiny_models import CountingConv

DRAW = torch.Generator().manual_seed(7)
X = torch.randn(3, 3, 20, 24, generator=DRAW, dtype=torch.float64)
MAPS = torch.randn(3, 20, 24, generator=DRAW, dtype=torch.float64)
TARGET = torch.tensor([0, 3, 1])


@pytest.fixture
def model() -> nn.Module:
    return CountingConv().double().eval()


def case_of(model: nn.Module, maps: Tensor = MAPS) -> Case:
    return Case(model, X, TARGET, maps, torch.zeros(3, 20, 24, dtype=torch.bool), lambda *_: maps, (-2.0, -1.9, -1.8))


def probability(model: nn.Module, image: Tensor, target: int) -> float:
    with torch.no_grad():
        return float(model(image[None])[0].softmax(0)[target])


def slow_saco(model: nn.Module, index: int, groups: int) -> float:
    """Algorithm 1 of the paper, for one image."""
    image, heat, target = X[index], MAPS[index].flatten(), int(TARGET[index])
    order = heat.argsort(descending=True)
    salience, drops = [], []
    for pixels in order.tensor_split(groups):
        changed = image.clone().flatten(1)
        changed[:, pixels] = image.mean((1, 2))[:, None]
        salience.append(float(heat[pixels].sum()))
        drops.append(probability(model, image, target) - probability(model, changed.view_as(image), target))
    total = coefficient = 0.0
    for i in range(groups - 1):
        for j in range(i + 1, groups):
            weight = salience[i] - salience[j] if drops[i] >= drops[j] else -(salience[i] - salience[j])
            coefficient += weight
            total += abs(weight)
    return coefficient / total


@pytest.mark.parametrize("groups", [2, 8, 10])
def test_saco_follows_its_algorithm(model, groups):
    scores = create_metric("saco", groups=groups).score(case_of(model))
    expected = [slow_saco(model, index, groups) for index in range(3)]
    torch.testing.assert_close(scores.values, torch.tensor(expected, dtype=torch.float64))
    assert groups == 2 or len({round(abs(one), 3) for one in expected} - {1.0}) > 1


def test_saco_goes_from_agreement_to_contradiction():
    salience = torch.tensor([[4.0, 2.0, 1.0], [4.0, 2.0, 1.0], [4.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    drops = torch.tensor([[0.3, 0.2, 0.1], [0.1, 0.2, 0.3], [0.3, 0.1, 0.2], [0.3, 0.2, 0.1]])
    values = saco(salience, drops)
    assert values[:2].tolist() == [1.0, -1.0]
    assert float(values[2]) == pytest.approx((2 + 3 - 1) / 6)
    assert math.isnan(float(values[3]))


def test_a_constant_map_has_no_saco(model):
    metric, case = create_metric("saco"), case_of(model, torch.ones_like(MAPS))
    assert metric.score(case).values.isnan().all()
    assert metric.reason(case, 0) == "map is constant"


@pytest.mark.parametrize("of", ["logit", "probability"])
def test_single_deletion_is_spearmans_correlation_over_patches(model, of):
    scores = create_metric("single_deletion", of=of).score(case_of(model))
    for index in range(3):
        sums, drops = [], []
        for top in range(0, 20, 5):
            for left in range(0, 24, 5):  # squares of a quarter of the shorter side; the last ones are cut off
                changed = X[index].clone()
                changed[:, top : top + 5, left : left + 5] = 0
                with torch.no_grad():
                    outputs = model(torch.stack([X[index], changed]))
                outputs = outputs if of == "logit" else outputs.softmax(1)
                sums.append(float(MAPS[index, top : top + 5, left : left + 5].sum()))
                drops.append(float(outputs[0, TARGET[index]] - outputs[1, TARGET[index]]))
        assert float(scores.values[index]) == pytest.approx(spearmanr(sums, drops).statistic)


@pytest.mark.parametrize(("name", "passes"), [("saco", 11), ("single_deletion", 17)])
def test_passes_are_as_many_as_the_documentation_says(model, name, passes):
    square = case_of(model)
    square = Case(model, X[..., :20], TARGET, MAPS[..., :20], square.regions[..., :20], square.explain)
    create_metric(name).score(square)
    assert model.images == 3 * passes


def test_complexity_is_the_entropy_of_the_magnitudes():
    expected = [entropy(np.abs(heat.numpy()).ravel()) for heat in MAPS]
    np.testing.assert_allclose(complexity(MAPS).numpy(), expected)
    single, even = torch.zeros(2, 1, 4, 5)
    single[0, 1, 2], even[0] = -3.0, 2.0
    assert complexity(torch.cat([single, even])).tolist() == pytest.approx([0.0, math.log(20)])


def test_sparseness_is_the_gini_index_of_the_magnitudes():
    """Half the mean absolute difference of all pairs, over the mean."""
    for heat, value in zip(MAPS.numpy(), sparseness(MAPS).tolist(), strict=True):
        flat = np.abs(heat).ravel()
        assert value == pytest.approx(np.abs(flat[:, None] - flat).mean() / (2 * flat.mean()))
    single, even = torch.zeros(2, 1, 4, 5)
    single[0, 1, 2], even[0] = -3.0, 2.0
    assert sparseness(torch.cat([single, even])).tolist() == pytest.approx([1 - 1 / 20, 0.0])


@pytest.mark.parametrize("name", ["complexity", "sparseness"])
def test_a_map_without_anything_is_not_scored(model, name):
    maps = MAPS.clone()
    maps[0], maps[1, 2, 3] = 0, torch.inf
    metric, case = create_metric(name), case_of(model, maps)
    assert metric.score(case).values.isnan().tolist() == [True, True, False]
    assert [metric.reason(case, index) for index in (0, 1)] == ["map is zero", "map is not finite"]
