"""Exact or refused: what every program must be, and the oracle that says what exact is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dave_vit import conservation_gap, effective_transformation
from dave_vit.errors import DaveError

TOLERANCE = 1e-9

Function = Callable[[Tensor], Tensor]
Held = Callable[[Tensor, Tensor], Tensor]
"""``held(x, at)``: the same function, affine in ``x``, with every operator made from ``at``."""


class Tokens(nn.Module):
    """A function of tokens ``[B, T, D]`` as a model: its output, flattened, is the logits."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x).flatten(1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def refusal(model: nn.Module, x: Tensor, target: int = 7) -> str | None:
    """What the refusal says, in one line; None where a map came out."""
    try:
        effective_transformation(model, x, target)
    except DaveError as error:
        said = str(error)
    else:
        return None
    assert "\n" not in said
    return said


def held_weight(held: Held, x: Tensor, target: int = 7) -> Tensor:
    """W by ordinary autograd, of the function in which the operators were made beforehand."""
    leaf = x.clone().requires_grad_()
    score = held(leaf, x.detach()).flatten(1)[:, target].sum()
    return torch.autograd.grad(score, leaf)[0]


def assert_exact_or_refused(function: Function | nn.Module, x: Tensor, held: Held | None = None) -> None:
    """A refusal is always right; a map must be the oracle's, and the constants must account for the rest.

    Args:
        function: a module, or a function of tokens.
        x: the input.
        held: the oracle; None where no exact map exists, so that only a refusal is right.
    """
    model = function if isinstance(function, nn.Module) else Tokens(function)
    if refusal(model, x) is not None:
        return
    assert held is not None, "a map came out where none is exact"
    torch.testing.assert_close(
        effective_transformation(model, x, 7), held_weight(held, x), rtol=TOLERANCE, atol=TOLERANCE
    )
    assert conservation_gap(model, x, 7) < TOLERANCE


def assert_exact(function: Function, x: Tensor, held: Held) -> None:
    """As above, where a refusal would be a loss."""
    assert refusal(Tokens(function), x) is None
    assert_exact_or_refused(function, x, held)
