"""What no map explains: randomness, values of earlier calls or outside of torch; and caches, which are fine."""

from __future__ import annotations

import ctypes
import random as python_random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from module_pairs.base import TOKENS, WIDTH, Form, Forms, Pair, block, enter_forms, linear, plain, spell

N = TOKENS


def without_map(**forms: Form) -> dict[str, tuple[Form, Form]]:
    """Return forms that no reference exists for."""
    return {name: (form, form) for name, form in forms.items()}


def shuffled(m: Forms, x: Tensor) -> Tensor:
    return x[:, torch.randperm(N)] * m.position


def drop_in_training(m: Forms, x: Tensor) -> Tensor:
    kept = torch.empty_like(x).bernoulli_(0.5)
    return x * kept / 0.5


def drop_paths(m: Forms, x: Tensor) -> Tensor:
    return x * (torch.rand(len(x), 1, 1, dtype=x.dtype) + 0.5).floor()


def own_generator(m: Forms, x: Tensor) -> Tensor:
    if not hasattr(m, "generator"):
        m.generator = torch.Generator().manual_seed(0)
    return x + torch.randn(x.shape, generator=m.generator, dtype=x.dtype)


enter_forms(
    "randomness",
    "Random",
    without_map(
        noise=lambda m, x: x + 0.1 * torch.randn_like(x),
        scale=lambda m, x: x * torch.rand_like(x),
        uniform=lambda m, x: x + torch.empty_like(x).uniform_(-1, 1),
        normal=lambda m, x: x * torch.normal(1.0, 0.2, x.shape, dtype=x.dtype),
        bernoulli=lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        of_the_image=lambda m, x: m.b(x) * torch.bernoulli(x.sigmoid()),
        multinomial=lambda m, x: x[:, torch.multinomial(torch.ones(N), 4)].mean(1, keepdim=True) * m.position,
        gumbel=lambda m, x: F.gumbel_softmax(m.b(x), dim=-1) * x,
        integers=lambda m, x: x * torch.randint(0, 2, x.shape),
        branch=lambda m, x: x if float(torch.rand(())) < 0.5 else 2 * x,
        shuffled=shuffled,
        dropout=drop_in_training,
        drop_paths=drop_paths,
        numpy=lambda m, x: x * torch.from_numpy(np.random.default_rng().random((N, WIDTH))),
        python=lambda m, x: x * python_random.SystemRandom().random(),
        generator=own_generator,
        clock=lambda m, x: x * (1 + time.perf_counter_ns() % 1000 / 1000),
    ),
    has_map=False,
)


@block("randomness")
class HarmlessShuffle(Pair):
    """Tokens in a random order, which their mean does not depend on."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.layer = linear(random)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.multinomial(torch.ones(N), N)
        return x + self.layer(x[:, order]).mean(1, keepdim=True)

    def reference(self, x: Tensor) -> Tensor:
        return x + self.layer(x).mean(1, keepdim=True)


@block("randomness")
class UnusedDraw(Pair):
    """Numbers are drawn, but nothing depends on them."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.layer = linear(random)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return self.layer(x)

    def reference(self, x: Tensor) -> Tensor:
        return self.layer(x)


def previous(m: Forms, x: Tensor) -> Tensor:
    before, m.before = getattr(m, "before", 0.0), x.detach().mean(1, keepdim=True).clone()
    return x + before


def running_mean(m: Forms, x: Tensor) -> Tensor:
    if not hasattr(m, "mean"):
        m.register_buffer("mean", torch.zeros(WIDTH, dtype=x.dtype))
    m.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return x - m.mean


def count_calls(m: Forms, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return x * m.calls


def keep_in_list(m: Forms, x: Tensor) -> Tensor:
    if not hasattr(m, "memory"):
        m.memory = []
    m.memory.append(x.detach().mean((0, 1)))
    return x + torch.stack(m.memory).mean(0)


def first_image(m: Forms, x: Tensor) -> Tensor:
    """Keep the first image for all later ones."""
    if not hasattr(m, "first"):
        m.first = x.detach().clone()
    return x - m.first


enter_forms(
    "caches",
    "EarlierCalls",
    without_map(previous=previous, running_mean=running_mean, count=count_calls, list=keep_in_list, first=first_image),
    has_map=False,
)


@lru_cache
def table(rows: int, columns: int) -> Tensor:
    return torch.sin(torch.arange(rows, dtype=torch.float64)[:, None] * torch.arange(columns))


def lazy(m: Forms, x: Tensor) -> Tensor:
    if not hasattr(m, "cached") or m.cached.shape[0] != x.shape[1]:
        m.cached = torch.sin(torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.arange(x.shape[2]))
    return x + m.cached


def lazy_dict(m: Forms, x: Tensor) -> Tensor:
    if not hasattr(m, "tables"):
        m.tables = {}
    if x.shape[1:] not in m.tables:
        m.tables[x.shape[1:]] = table(*x.shape[1:]).clone()
    return x + m.tables[x.shape[1:]]


def lazy_buffer(m: Forms, x: Tensor) -> Tensor:
    if "cached" not in m._buffers:
        m.register_buffer("cached", table(*x.shape[1:]).clone(), persistent=False)
    return x + m.cached.to(x)


enter_forms(
    "caches",
    "ShapeCaches",
    spell(
        lambda m, x: x + table(N, WIDTH),
        lru=lambda m, x: x + table(x.shape[1], x.shape[2]),
        lazy=lazy,
        dict=lazy_dict,
        buffer=lazy_buffer,
        every_time=lambda m, x: x + torch.sin(torch.arange(N, dtype=x.dtype)[:, None] * torch.arange(WIDTH)),
        vmap=lambda m, x: (
            x
            + torch.vmap(torch.vmap(lambda i, j: torch.sin(i.double() * j), (None, 0)), (0, None))(
                torch.arange(N), torch.arange(WIDTH)
            )
        ),
        generator=lambda m, x: (
            x + table(N, WIDTH) + 0 * torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(3))
        ),
        numbers=lambda m, x: (
            x
            + torch.tensor(
                [
                    [float(torch.sin(torch.tensor(float(i * j), dtype=torch.float64))) for j in range(x.shape[2])]
                    for i in range(x.size(1))
                ],
                dtype=x.dtype,
            )
        ),
        numpy=lambda m, x: x + torch.from_numpy(np.sin(np.arange(N)[:, None] * np.arange(WIDTH).astype(float))),
    ),
)


def kept_generator(m: Forms, x: Tensor) -> Tensor:
    """A generator that each pass seeds anew, so that its numbers are always the same."""
    if not hasattr(m, "generator"):
        m.generator = torch.Generator()
    return x * torch.rand(N, WIDTH, generator=m.generator.manual_seed(7), dtype=x.dtype)


enter_forms(
    "caches",
    "SeededDraws",
    {
        "kept": plain(kept_generator),
        "new": plain(
            lambda m, x: x * torch.rand(N, WIDTH, generator=torch.Generator().manual_seed(7), dtype=x.dtype) + m.b(x)
        ),
        "order": plain(lambda m, x: x[:, torch.randperm(N, generator=torch.Generator().manual_seed(7))] * m.position),
        "numpy": plain(lambda m, x: x * np.random.default_rng(7).random()),
    },
)


def in_thread(m: Forms, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return x + pool.submit(lambda: torch.tanh(x.detach())).result()


def in_thread_without_gradients(m: Forms, x: Tensor) -> Tensor:
    def work() -> Tensor:
        with torch.no_grad():
            return m.b(x).mean(1, keepdim=True)

    with ThreadPoolExecutor(1) as pool:
        return x * pool.submit(work).result()


def by_capsule(m: Forms, x: Tensor) -> Tensor:
    return x + torch.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach()))


def by_memory(m: Forms, x: Tensor) -> Tensor:
    copy = x.detach().contiguous().clone()
    numbers = np.ctypeslib.as_array(ctypes.cast(copy.data_ptr(), ctypes.POINTER(ctypes.c_double)), tuple(x.shape))
    return x + torch.from_numpy(numbers.copy())


def by_storage(m: Forms, x: Tensor) -> Tensor:
    numbers = list(x.detach().contiguous().untyped_storage())[:8]
    return x * (1 + sum(int(number) for number in numbers) / 1000)


def by_text(m: Forms, x: Tensor) -> Tensor:
    digits = [letter for letter in repr(x.detach()) if letter.isdigit()]
    return x * float("1." + "".join(digits[:6]))


def by_numpy(m: Forms, x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy().mean(1, keepdims=True))


def by_number(m: Forms, x: Tensor) -> Tensor:
    return x * x.detach().mean().item()


def by_list(m: Forms, x: Tensor) -> Tensor:
    return x + torch.tensor(x.detach()[:, 0].tolist(), dtype=x.dtype)[:, None]


enter_forms(
    "leaks",
    "Leaks",
    without_map(
        thread=in_thread,
        thread_without_gradients=in_thread_without_gradients,
        capsule=by_capsule,
        memory=by_memory,
        storage=by_storage,
        text=by_text,
        numpy=by_numpy,
        number=by_number,
        list=by_list,
        data=lambda m, x: x + x.data.tanh(),
        two_carriers=lambda m, x: m.b(x) * x,
        score=lambda m, x: x + (m.b(x) * x).sum(-1, keepdim=True),
        exponential=lambda m, x: x + torch.exp(x),
        sine=lambda m, x: torch.sin(x),
        probability=lambda m, x: torch.sigmoid(x),
    ),
    has_map=False,
)
