"""Symmetric relevance gain and R-OMS against loops that follow their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dave_vit.metrics import Case, create_metric
from dave_vit.metrics.perturbation import gaussian_blur
from tiny_models import CountingConv

DRAW = torch.Generator().manual_seed(5)
X = torch.randn(3, 3, 28, 40, generator=DRAW, dtype=torch.float64)
MAPS = torch.randn(3, 28, 40, generator=DRAW, dtype=torch.float64)
TARGET = torch.tensor([0, 3, 1])
BLACK = (-2.0, -1.9, -1.8)


@pytest.fixture
def model() -> nn.Module:
    return CountingConv().double().eval()


def case_of(model: nn.Module, maps: Tensor = MAPS, inputs: Tensor = X) -> Case:
    regions = torch.zeros(inputs.shape[0], *inputs.shape[2:], dtype=torch.bool)
    return Case(model, inputs, TARGET, maps, regions, lambda *_: maps, BLACK)


def baselines(inputs: Tensor) -> dict[str, Tensor]:
    return {
        "zero": torch.zeros_like(inputs),
        "blur": gaussian_blur(inputs),
        "mean": inputs.mean((2, 3), keepdim=True).expand_as(inputs),
        "black": torch.tensor(BLACK, dtype=inputs.dtype).view(1, 3, 1, 1).expand_as(inputs),
    }


def flip(model: nn.Module, index: int, order: list[int], side: int, fill: Tensor, steps: int) -> float:
    """Area under the curve of pixel flipping of one image: cells of a side are replaced one after the other."""
    image, across = X[index].clone(), X.shape[3] // side
    heights = []
    for step in range(steps + 1):
        for cell in order[round((step - 1) / steps * len(order)) if step else 0 : round(step / steps * len(order))]:
            top, left = cell // across * side, cell % across * side
            image[:, top : top + side, left : left + side] = fill[:, top : top + side, left : left + side]
        with torch.no_grad():
            heights.append(float(model(image[None])[0].softmax(0)[TARGET[index]]))
    return float(np.trapezoid(heights, dx=1 / steps))


@pytest.mark.parametrize(("regions", "side"), [(7, 4), ("pixels", 1)])
@pytest.mark.parametrize("baseline", ["zero", "blur", "mean", "black"])
def test_srg_is_the_area_between_least_and_most_relevant_first(model, regions, side, baseline):
    scores = create_metric("srg", baseline=baseline, regions=regions, steps=7).score(case_of(model))
    for index in range(3):
        cells = MAPS[index].numpy().reshape(28 // side, side, 40 // side, side).mean((1, 3)).ravel()
        order = np.argsort(cells).tolist()
        fill = baselines(X)[baseline][index]
        least, most = (flip(model, index, one, side, fill, 7) for one in (order, order[::-1]))
        assert float(scores.values[index]) == pytest.approx(least - most, abs=1e-7)
        assert abs(least - most) > 1e-5


def test_several_baselines_give_their_mean(model):
    single = [create_metric("srg", baseline=one).score(case_of(model)) for one in ("zero", "blur")]
    both = create_metric("srg").score(case_of(model))
    torch.testing.assert_close(both.values, (single[0].values + single[1].values) / 2)
    torch.testing.assert_close(both.curves, (single[0].curves + single[1].curves) / 2)


def test_a_constant_map_gains_nothing_and_a_reversed_one_loses_as_much(model):
    metric = create_metric("srg")
    assert torch.equal(metric.score(case_of(model, torch.ones_like(MAPS))).values, torch.zeros(3))
    gain, loss = (metric.score(case_of(model, maps)).values for maps in (MAPS, -MAPS))
    torch.testing.assert_close(gain, -loss)


def test_a_map_with_a_hole_is_not_scored(model):
    maps = MAPS.clone()
    maps[1, 2, 3] = torch.nan
    assert create_metric("srg").score(case_of(model, maps)).values.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize(("name", "passes"), [("srg", 2 * 2 * 4), ("r_oms", 2 * 6)])
def test_passes_are_as_few_as_possible(model, name, passes):
    create_metric(name, steps=5).score(case_of(model))
    assert model.images == 3 * passes


def test_r_oms_is_the_mean_probability_under_random_removal(model):
    """Over many orders; one order is the same for every map and every image."""
    draws = [create_metric("r_oms", baseline="zero", regions=7, steps=7, seed=seed) for seed in range(60)]
    areas = torch.stack([one.score(case_of(model)).values for one in draws]).mean(0)
    generator = np.random.default_rng(1)
    for index in range(3):
        orders = (generator.permutation(70).tolist() for _ in range(60))
        expected = [flip(model, index, order, 4, torch.zeros_like(X[index]), 7) for order in orders]
        error = np.std(expected) * (2 / 60) ** 0.5
        assert float(areas[index]) == pytest.approx(np.mean(expected), abs=4 * error)
    assert torch.equal(draws[0].score(case_of(model, MAPS.flip(1))).values, draws[0].score(case_of(model)).values)
