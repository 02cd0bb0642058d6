"""Where the additive constants of a model act: biases, position embeddings and class tokens, by place in the image."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dave_vit.intercept import RuleSet
from dave_vit.methods.base import Explanation, joined
from dave_vit.precision import precise_dtype
from dave_vit.run import Gradient, gradient
from dave_vit.run.layout import token_grid
from dave_vit.targets import Target

_CHANNELS_FIRST = frozenset(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution batch_norm group_norm
    instance_norm""".split()
)
_CHANNELS_LAST = frozenset("linear layer_norm rms_norm".split())


@dataclass(frozen=True)
class Contribution:
    """What one additive constant adds to the score, value by value.

    Attributes:
        grid: by channel and place ``[D, h, w]``; None where the constant has no place in the image.
        elsewhere: the sum of what has no place, such as the class token's share.
    """

    grid: Tensor | None
    elsewhere: Tensor

    def spread(self, size: tuple[int, int]) -> Tensor:
        """A map ``[H, W]`` with the same sum, or the one value ``[]`` of all pixels where nothing has a place."""
        rest = self.elsewhere / math.prod(size)
        return rest if self.grid is None else rest + spread_evenly(self.grid.sum(0), size)


def contributions(
    model: nn.Module, image: Tensor, target: Target, *, rules: RuleSet, autocast: torch.dtype | None = None
) -> tuple[Gradient, list[Contribution]]:
    """One pass for one image ``[1, C, H, W]``, with what every additive constant contributes to the score.

    One image at a time, since sequence-first and windowed layers hide which row belongs to which image of a batch.
    """
    passed = gradient(model, image, target, rules=rules, autocast=autocast, record_constants=True)
    size = (image.shape[-2], image.shape[-1])
    parts = []
    for constant in passed.constants:
        amount = torch.where(constant.derivative == 0, 0.0, constant.value * constant.derivative)  # a mask may be -inf
        parts.append(_placed(constant.function, amount.to(precise_dtype(amount.device)), size))
    return passed, parts


def _placed(name: str, amount: Tensor, size: tuple[int, int]) -> Contribution:
    """Find the places of a constant's values by its shape and the layout of the function that added it."""
    if amount.ndim == 4 and len(amount) == 1:  # [1, D, h, w] or [1, h, w, D]
        grid = amount[0] if _channels_first(name, amount, size) else amount[0].movedim(-1, 0)
        if _is_grid(grid.shape[1], grid.shape[2], size):
            return Contribution(grid, amount.new_zeros(()))
    elif amount.ndim == 3 and 1 in amount.shape[:2] and name not in _CHANNELS_FIRST:  # [1, N, D] or [N, 1, D]
        tokens = amount.flatten(0, 1).T  # [D, N]
        rows, columns = token_grid(tokens.shape[1], size) or (1, 1)
        before = tokens.shape[1] - rows * columns  # class and register tokens come first
        return Contribution(tokens[:, before:].unflatten(1, (rows, columns)), tokens[:, :before].sum())
    return Contribution(None, amount.sum())


def _channels_first(name: str, amount: Tensor, size: tuple[int, int]) -> bool:
    if name in _CHANNELS_FIRST or name in _CHANNELS_LAST:
        return name in _CHANNELS_FIRST
    return _is_grid(amount.shape[2], amount.shape[3], size) and not _is_grid(amount.shape[1], amount.shape[2], size)


def _is_grid(rows: int, columns: int, size: tuple[int, int]) -> bool:
    """Whether a map has the image's aspect, up to a cut-off row, and no more places than pixels."""
    return abs(rows * size[1] - columns * size[0]) <= max(size) and rows <= size[0] and columns <= size[1]


def spread_evenly(grid: Tensor, size: tuple[int, int]) -> Tensor:
    """A map ``[h, w]`` at ``size`` with the same sum: each value shared evenly by the pixels of its place."""
    shares = []
    for extent, pixels in zip(grid.shape, size, strict=True):
        place = torch.arange(pixels, device=grid.device) * extent // pixels
        shares.append((place, torch.bincount(place, minlength=extent)))
    (row, high), (column, wide) = shares
    return (grid / (high[:, None] * wide))[row][:, column]


def per_channel(maps: Tensor, channels: int) -> Tensor:
    """Maps ``[..., H, W]`` as attributions ``[..., C, H, W]`` whose channel sum they are."""
    return (maps / channels).unsqueeze(-3).expand(*maps.shape[:-2], channels, *maps.shape[-2:])


def summed(maps: Iterable[Tensor], image: Tensor) -> Tensor:
    """Maps ``[H, W]`` added up in the widest type, as an attribution in the type of the image."""
    total = torch.zeros(image.shape[-2:], dtype=precise_dtype(image.device), device=image.device)
    for each in maps:
        total += each
    return per_channel(total, image.shape[1]).to(image.dtype)


def one_by_one(images: Tensor, target: Target, explain: Callable[[Tensor, Target], Explanation]) -> Explanation:
    """One image ``[1, C, H, W]`` and one class a pass, so that every additive constant is known to be theirs."""
    parts = [
        joined([explain(images[i : i + 1], single.part(i, i + 1)) for i in range(len(images))])
        for single in target.singles()
    ]
    if not target.several:
        return parts[0]
    return Explanation(torch.stack([part.attribution for part in parts], 1), target.indices)
