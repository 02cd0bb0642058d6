"""The conservation identity in its parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dave_vit.engine.gradient import Balance, compute_balances, conservation_gap


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 4)).double().eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_parts_by_module(model, images):
    first, second = compute_balances(model, images, [1, 3])
    logits = model(images).detach()
    assert (first.score, second.score) == pytest.approx((float(logits[0, 1]), float(logits[1, 3])))
    assert list(first.constants) == ["1", "3"]
    assert first.constants["3"] == pytest.approx(model[3].bias[1].item())
    assert first.explained + sum(first.constants.values()) == pytest.approx(first.score, abs=1e-14)


def test_the_gap_is_relative_to_the_larger_part():
    assert Balance(score=2.0, explained=-8.0, constants={"a": 4.0, "b": 5.0}).gap == pytest.approx(1 / 8)
    assert Balance(score=4.0, explained=1.0, constants={}).gap == pytest.approx(3 / 4)
    assert Balance(score=0.0, explained=0.0, constants={}).gap == 0


def test_every_form_of_target(model, images):
    several = torch.tensor([[0, 1, 2], [3, 2, 1]])
    assert len(list(compute_balances(model, images, several))) == 6
    scores = [balance.score for balance in compute_balances(model, images, several)]
    assert scores == pytest.approx(model(images).gather(1, several).flatten().tolist())
    for target in (None, 2, [0, 3], several, several.numpy(), lambda logits: logits[:, 0] - logits[:, 1]):
        assert conservation_gap(model, images, target) < 1e-13


def test_the_largest_gap_counts(model, images):
    class Leaking(nn.Module):
        def forward(self, x):
            y = model(x)
            return y.masked_fill(torch.arange(4) == 2, torch.inf)  # a constant that cannot be recorded

    several = torch.tensor([[0, 2], [0, 1]])
    assert not conservation_gap(Leaking(), images, several) < 1e-9
    assert conservation_gap(Leaking(), images, several[:, :1]) < 1e-9
