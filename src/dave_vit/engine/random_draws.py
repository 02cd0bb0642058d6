"""Random functions inside of a model: every pass makes the same draws, from a generator of its own.

The global generators are neither read nor moved, so that other threads keep their random numbers. Models whose output
depends on the draws are refused by the soundness check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dave_vit.engine.operators import function_name
from dave_vit.engine.states import tensors

RANDOM_FUNCTIONS = frozenset(
    """rand randn randint randperm normal bernoulli multinomial poisson binomial uniform exponential geometric cauchy
    log_normal random rand_like randn_like randint_like""".split()
)
# These take no generator in older versions of torch: an empty tensor is filled instead.
_FILLS: dict[str, Callable[..., Tensor]] = {
    "rand_like": Tensor.uniform_,
    "randn_like": Tensor.normal_,
    "randint_like": Tensor.random_,
}


class RandomDraws:
    """Generators of one pass, one for each device.

    Args:
        seed: of each of them.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}  # empty where nothing was drawn

    def bind(self, func: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a random function that draws from these generators, unless it is called with another one."""

        def draw(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("generator") is not None:
                return func(*args, **kwargs)
            generator = self._generator(args, kwargs)
            if name in _FILLS:
                limits = [kwargs.pop(limit) for limit in ("low", "high") if limit in kwargs]
                return _FILLS[name](torch.empty_like(args[0], **kwargs), *args[1:], *limits, generator=generator)
            return func(*args, **{**kwargs, "generator": generator})

        return draw

    def _generator(self, args: Any, kwargs: Any) -> torch.Generator:
        given = kwargs.get("device") or next((tensor.device for tensor in tensors((args, kwargs))), None)
        device = torch.empty(0, device=given).device  # with its index, and the default device where none is given
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self.generators[device]


class HoldDraws(TorchFunctionMode):
    """Context in which random functions draw from generators of its own, and plain forward passes repeat their draws.

    Args:
        seed: of the generators.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._draws = RandomDraws(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bind random functions to the generators of this pass; all others run as they are."""
        name = function_name(func).name
        return (self._draws.bind(func, name) if name in RANDOM_FUNCTIONS else func)(*args, **(kwargs or {}))
