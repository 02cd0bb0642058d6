"""Where a model's tokens lie in the picture: found by watching one forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dave_vit.errors import InputError, OutputError
from dave_vit.intercept.calls import function_name


@dataclass(frozen=True)
class TokenLayout:
    """Tokens of a model for inputs of one size.

    Attributes:
        grid: rows and columns of patches.
        prefix: tokens before them: class, distillation, registers.
    """

    grid: tuple[int, int]
    prefix: int

    @property
    def tokens(self) -> int:
        """How many tokens attention sees."""
        return self.prefix + self.grid[0] * self.grid[1]

    def to_grid(self, values: Tensor) -> Tensor:
        """One value a token ``[..., tokens]`` as a picture of the patches ``[..., rows, columns]``."""
        if values.shape[-1] != self.tokens:
            raise InputError(f"{values.shape[-1]} values for {self.tokens} tokens; give one value a token")
        return values[..., self.prefix :].reshape(*values.shape[:-1], *self.grid)


def token_layout(model: nn.Module, inputs: Tensor) -> TokenLayout:
    """Grid and prefix tokens of a Vision Transformer, for inputs of this size.

    Args:
        model: any module; nothing of it is changed.
        inputs: preprocessed images ``[B, C, H, W]``; only their size counts.
    """
    watch = _Watch()
    with torch.no_grad(), watch:
        model(inputs[:1])
    if not watch.attended:
        raise OutputError("the model has no self-attention, so it has no token grid; use a method that needs none")
    counts = sorted(set(watch.attended))
    grid = _grid(watch, counts[0], inputs)
    if len(counts) > 1 or grid is None:
        raise OutputError(
            f"the model has no single token grid (attention over {', '.join(map(str, counts[:4]))} tokens, as in "
            "windows or stages); use a method that needs no attention maps, such as dave"
        )
    return TokenLayout(grid, counts[0] - grid[0] * grid[1])


class _Watch(TorchFunctionMode):
    """Notes the size of every feature map before the first attention, and how many tokens attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[tuple[int, int]] = []
        self.attended: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func).name
        result = func(*args, **(kwargs or {}))
        if name == "conv2d" and not self.attended:
            self.maps.append((result.shape[-2], result.shape[-1]))
        elif name == "scaled_dot_product_attention":
            self._attention(*(tensor.shape[-2] for tensor in _query_and_key(args, kwargs)))
        elif name == "multi_head_attention_forward":  # [L, N, E]
            self._attention(*(tensor.shape[0] for tensor in _query_and_key(args, kwargs)))
        elif name == "softmax" and result.ndim >= 3:
            self._attention(*result.shape[-2:])
        return result

    def _attention(self, queries: int, keys: int) -> None:
        if queries == keys:  # attention pooling asks with other queries than the tokens
            self.attended.append(keys)


def _query_and_key(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
    given = {**dict(zip(("query", "key"), args, strict=False)), **(kwargs or {})}
    return [given["query"], given["key"]]


def _grid(watch: _Watch, tokens: int, inputs: Tensor) -> tuple[int, int] | None:
    """The largest feature map that the tokens can hold; by the picture's shape where patches were cut by reshaping."""
    if watch.maps:
        fitting = [size for size in watch.maps if math.prod(size) <= tokens]
    else:
        height, width = inputs.shape[-2:]
        sides = [side for side in range(1, min(height, width) + 1) if height % side == 0 and width % side == 0]
        fitting = [(height // side, width // side) for side in sides if height // side * (width // side) <= tokens]
    return max(fitting, key=math.prod, default=None)
