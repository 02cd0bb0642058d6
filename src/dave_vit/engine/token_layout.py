"""Find where a model's tokens lie in the image, by observing one forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dave_vit.engine.forward import Read
from dave_vit.engine.observation import Observation, observe
from dave_vit.engine.targets import class_logits
from dave_vit.errors import InputError, OutputError


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
        """Arrange one value a token ``[..., tokens]`` in the grid of patches ``[..., rows, columns]``."""
        if values.shape[-1] != self.tokens:
            raise InputError(f"{values.shape[-1]} values for {self.tokens} tokens; give one value a token")
        return values[..., self.prefix :].reshape(*values.shape[:-1], *self.grid)


def find_token_layout(model: nn.Module, inputs: Tensor, read: Read = class_logits) -> TokenLayout:
    """Find grid and prefix tokens of a Vision Transformer, for inputs of this size.

    Args:
        model: any module that maps inputs to logits; nothing of it is changed.
        inputs: preprocessed images ``[B, C, H, W]``; only their size counts.
        read: what is read out of the model's output, where it is no logits.
    """
    with observe(model, inputs[:1], read=read) as observed:
        sizes = [attention.matrix.shape[-2:] for attention in observed.attention]
        maps = observed.maps
    counts = sorted({keys for queries, keys in sizes if queries == keys})  # pooling has other queries
    if not counts:
        raise OutputError("the model has no self-attention, so it has no token grid; use a method that needs none")
    grid = find_token_grid(counts[0], inputs.shape[-2:], maps)
    if len(counts) > 1 or grid is None:
        raise OutputError(
            f"the model has no single token grid (attention over {', '.join(map(str, counts[:4]))} tokens, as in "
            "windows or stages); use a method that needs no attention maps, such as dave"
        )
    others = [keys for queries, keys in sizes if queries != keys]
    if len(others) > 1 or others not in ([], counts):
        raise OutputError(
            f"beside its {counts[0]} tokens' attention the model has other attention (class attention over "
            f"{others[0]} tokens); use a method that needs no attention maps, such as dave"
        )
    return TokenLayout(grid, counts[0] - math.prod(grid))


def guess_token_layout(observed: Observation, tokens: int, images: Tensor) -> TokenLayout:
    """Guess the layout of that many tokens; those before the grid are class and register tokens."""
    size = images.shape[-2:]
    grid = find_token_grid(tokens, size, observed.maps) or find_token_grid(tokens, size) or (1, 1)
    return TokenLayout(grid, tokens - math.prod(grid))


def find_token_grid(
    tokens: int, size: Sequence[int], maps: Sequence[tuple[int, int]] | None = None
) -> tuple[int, int] | None:
    """Return rows and columns of patches, the largest grid that the tokens can hold.

    Args:
        tokens: how many there are, with class and register tokens.
        size: height and width of the image.
        maps: feature maps that the model made before its first attention, of which one must be the grid; without any,
            patches are square and tile the image.
    """
    largest = math.gcd(*size)
    sides = [side for side in range(1, largest + 1) if largest % side == 0]
    candidates = maps or [(size[0] // side, size[1] // side) for side in sides]
    fitting = [grid for grid in candidates if math.prod(grid) <= tokens]
    return max(fitting, key=math.prod, default=None)


def find_patch_side(model: nn.Module) -> int | None:
    """Return the side of the patches in pixels, if the model cuts them out by a convolution."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            sides = {*module.kernel_size, *module.stride}
            return sides.pop() if len(sides) == 1 and sides != {1} else None
    return None
