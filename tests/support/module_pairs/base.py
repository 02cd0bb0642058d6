"""Modules that are written twice: once as people write them, once with ``.detach()`` at everything that is held.

The second form is the oracle: it is plain PyTorch, knows nothing of the engine, and its ordinary gradient is the
effective transformation. No block returns a bare activation, so that blocks can be put in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import ClassVar

import torch
from torch import Tensor, nn

SIDE, PATCH, GRID = 6, 2, 3
TOKENS, WIDTH, HEADS = GRID * GRID, 8, 2

Function = Callable[[Tensor], Tensor]


class Pair(nn.Module):
    """A module of tokens ``[B, TOKENS, WIDTH]`` with two forms of the same value.

    Attributes:
        decides: the image decides on something (an index, a branch), so that a refusal is no loss.
        has_map: whether an exact map exists; where none does, only a refusal is right.
    """

    decides: ClassVar[bool] = False
    has_map: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def reference(self, x: Tensor) -> Tensor:
        raise NotImplementedError


BLOCKS: dict[str, list[type[Pair]]] = {}


def block(group: str) -> Callable[[type[Pair]], type[Pair]]:
    """Enter a block, made by ``cls(random)``, into a group."""

    def enter(cls: type[Pair]) -> type[Pair]:
        BLOCKS.setdefault(group, []).append(cls)
        return cls

    return enter


Form = Callable[["Forms", Tensor], Tensor]


class Forms(Pair):
    """A block by one of several functions ``form(module, x)``; all of them share the same parameters."""

    forms: ClassVar[dict[str, tuple[Form, Form]]] = {}

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.name = random.choice(sorted(self.forms))
        self.a, self.b, self.c = (linear(random) for _ in range(3))
        self.packed = nn.Linear(WIDTH, 2 * WIDTH, bias=random.random() < 0.5)
        self.scale, self.shift, self.latent = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(3))
        self.position = nn.Parameter(torch.zeros(1, TOKENS, WIDTH))
        self.kernel = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=random.choice([1, WIDTH]))
        mask = torch.tensor([[random.random() < 0.6 for _ in range(TOKENS)] for _ in range(TOKENS)])
        self.register_buffer("mask", mask | torch.eye(TOKENS, dtype=torch.bool))  # each query sees itself
        self.register_buffer("order", torch.tensor(random.sample(range(TOKENS), TOKENS)))
        self.amount = random.choice([0.3, 0.7, 1.3])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c(self.forms[self.name][0](self, self.a(x)))

    def reference(self, x: Tensor) -> Tensor:
        return x + self.c(self.forms[self.name][1](self, self.a(x)))

    def extra_repr(self) -> str:
        return self.name


def enter_forms(group: str, name: str, forms: dict[str, tuple[Form, Form]], **properties: object) -> None:
    """Enter a block that takes one of these forms."""
    block(group)(type(name, (Forms,), {"forms": forms, **properties}))


def spell(held: Form, **spellings: Form) -> dict[str, tuple[Form, Form]]:
    """Return several spellings of one reference."""
    return {name: (form, held) for name, form in spellings.items()}


def plain(form: Form) -> tuple[Form, Form]:
    """Return a form that holds nothing: it is linear as it is written."""
    return form, form


def hold_or_not(*functions: Callable[[Forms, Tensor, Function], Tensor]) -> dict[str, tuple[Form, Form]]:
    """Return forms of functions ``function(module, x, hold)``, where ``hold`` marks what the reference detaches."""
    return {f.__name__: (partial(f, hold=lambda y: y), partial(f, hold=Tensor.detach)) for f in functions}


def linear(random: Random, width: int = WIDTH, out: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, out, bias=random.random() < 0.7)


def gate(function: Function, x: Tensor, at_zero: float) -> Tensor:
    """x * phi(x) with phi held."""
    with torch.no_grad():
        quotient = function(x) / torch.where(x == 0, torch.ones_like(x), x)
    return x * torch.where(x == 0, at_zero, quotient)


def centre(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """Layer norm without parameters, its scale held."""
    scale = (x.var(dims, unbiased=False, keepdim=True) + eps).rsqrt()
    return (x - x.mean(dims, keepdim=True)) * scale.detach()


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def image(tokens: Tensor) -> Tensor:
    return tokens.transpose(1, 2).unflatten(2, (GRID, GRID))


def tokens(image: Tensor) -> Tensor:
    return image.flatten(2).transpose(1, 2)
