"""Random numbers: explanations leave the global generators alone, and models that draw repeat their draws."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import tiny_models
from dave_vit import create_method, effective_transformation
from dave_vit.engine import dataflow
from dave_vit.engine.forward import HoldDraws, compute_logits
from dave_vit.errors import UnsupportedOperator

X = tiny_models.images()
DRAWS = {
    "rand": lambda like: torch.rand(like.shape),
    "randn": lambda like: torch.randn(like.shape, device=like.device),
    "randint": lambda like: torch.randint(0, 9, like.shape),
    "randperm": lambda like: torch.randperm(len(like))[:1],  # the mean of all is the same in every order
    "rand_like": torch.rand_like,
    "randn_like": lambda like: torch.randn_like(like, dtype=torch.float64),
    "randint_like": lambda like: torch.randint_like(like, 3, 9),
    "randint_like by name": lambda like: torch.randint_like(like, low=3, high=9),
    "normal": lambda like: torch.normal(like, 1.0),
    "bernoulli": lambda like: torch.bernoulli(like / 8),
    "bernoulli_": lambda like: torch.empty_like(like).bernoulli_(0.5),
    "uniform_": lambda like: torch.empty_like(like).uniform_(),
    "exponential_": lambda like: torch.empty_like(like).exponential_(),
    "multinomial": lambda like: torch.multinomial(like + 1, 5),
    "poisson": lambda like: torch.poisson(like),
}


class Noisy(nn.Module):
    """A linear model plus the sum of some random numbers, the same for all images."""

    def __init__(self, draw, *, is_used: bool = True) -> None:
        super().__init__()
        self.head, self.draw, self.is_used = nn.Linear(X[0].numel(), 4, bias=False), draw, is_used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x.flatten(1))
        noise = self.draw(torch.arange(8.0)).float().mean()
        return logits + noise if self.is_used else logits


def test_numbers_of_other_threads_are_not_rolled_back():
    methods = [create_method(name, tiny_models.vit(), **tiny_models.HIDING.get(name, {})) for name in ("dave", "rise")]
    torch.manual_seed(0)
    expected = [torch.rand(1).item() for _ in range(1000)]
    torch.manual_seed(0)
    drawn: list[float] = []
    other = threading.Thread(target=lambda: drawn.extend(torch.rand(1).item() for _ in range(1000)))
    other.start()
    explained = 0
    while other.is_alive() or not explained:
        methods[explained % 2].attribute(X[:1])
        explained += 1
    other.join()
    assert drawn == expected


@pytest.mark.parametrize("name", DRAWS)
def test_a_model_that_draws_repeats_its_draws_and_is_refused(name):
    model, before = Noisy(DRAWS[name]), torch.get_rng_state()
    assert torch.equal(compute_logits(model, X), compute_logits(model, X))
    with pytest.raises(UnsupportedOperator, match="random numbers"):
        effective_transformation(model, X, 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_are_drawn_and_not_used_do_no_harm(name):
    model, before = Noisy(DRAWS[name], is_used=False), torch.get_rng_state()
    weight = effective_transformation(model, X, 0)
    torch.testing.assert_close((weight * X).flatten(1).sum(1), compute_logits(model, X)[:, 0], rtol=1e-3, atol=1e-5)
    assert torch.equal(before, torch.get_rng_state())


def test_a_context_with_a_seed_draws_as_the_global_generator_would():
    torch.manual_seed(5)
    expected = [draw(torch.arange(8.0)) for draw in DRAWS.values()]
    before = torch.get_rng_state()
    with HoldDraws(5):
        found = [draw(torch.arange(8.0)) for draw in DRAWS.values()]
    assert torch.equal(before, torch.get_rng_state())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_choice_among_forms_of_attention_draws_nothing():
    """CUDA dispatches it as a kernel of its own, which torch counts among those that may draw."""
    choice = torch.ops.aten._fused_sdp_choice.default
    assert torch.Tag.nondeterministic_seeded in choice.tags
    assert not dataflow._Kernel(choice).draws
    assert dataflow._Kernel(torch.ops.aten.native_dropout.default).draws
