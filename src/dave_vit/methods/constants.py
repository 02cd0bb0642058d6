"""Additive constants of a model (biases, position embeddings, class tokens), at the places where they act."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine import RuleSet, Target
from dave_vit.engine.gradient import Constant, find_batch_axes, gradient
from dave_vit.engine.interception import RecordedConstant
from dave_vit.engine.observation import find_token_grid
from dave_vit.methods.base import Method
from dave_vit.methods.explanation import Explanation, join_explanations

_CHANNELS_FIRST = frozenset(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution batch_norm group_norm
    instance_norm""".split()
)
CONSTANT_ROWS = {"cuda": 16, "cpu": 8}
"""Images in one pass: all constants and their derivatives are kept."""
_CHANNELS_LAST = frozenset("linear layer_norm rms_norm".split())


@dataclass(frozen=True)
class Contribution:
    """Contribution of one additive constant to the scores of a batch, value by value.

    Attributes:
        grid: by channel and place ``[b, D, h, w]``; None where the constant has no place in the image.
        outside: what has no place, such as the class token's share, ``[b, ...]``.
    """

    grid: Tensor | None
    outside: Tensor

    def spread(self, size: Sequence[int]) -> Tensor:
        """Return maps ``[b, H, W]`` with the same sums, or one value ``[b, 1, 1]`` for all pixels without a place."""
        rest = (self.outside.flatten(1).sum(1) / math.prod(size)).view(-1, 1, 1)
        return rest if self.grid is None else rest + spread_evenly(self.grid.sum(1), size)


Make = Callable[[Tensor, Iterable[Contribution]], Tensor]
"""Function from weight times images ``[b, C, H, W]`` and the contributions to attributions."""


def attributions(method: Method, images: Tensor, target: Target, make: Make, rules: RuleSet) -> Explanation:
    """Compute attributions that include every additive constant at its place in its own image.

    A batch takes one pass if the batch dimension of every constant is known. Windows hide it: images of such models are
    explained one at a time.

    Args:
        method: gives the model and its precision.
        images: ``[b, C, H, W]``.
        target: what is explained of them.
        make: computes the attributions.
        rules: the derivatives, and which constants are recorded.
    """
    model, autocast, is_alone = method.model, method.autocast, len(images) == 1
    axes = None if is_alone else find_batch_axes(model, images, target, rules=rules, autocast=autocast)
    if not is_alone and (axes is None or None in axes):
        parts = [(images[i : i + 1], target.part(i, i + 1)) for i in range(len(images))]
        return join_explanations([attributions(method, *part, make, rules) for part in parts])

    def combine(weight: Tensor, constants: Sequence[Constant]) -> Tensor:
        sides = axes or [find_single(constant.value) for constant in constants]
        dtype, size = precise_dtype(images.device), images.shape[-2:]
        pairs = zip(constants, sides, strict=True)  # one at a time, since contributions are large
        amounts = (((one.value * one.derivative[0]).to(dtype), one.function, side) for one, side in pairs)
        return make(weight * images, (_place(*amount, size) for amount in amounts))

    passed = gradient(model, images, target, rules=rules, autocast=autocast, combine=combine)
    return Explanation(passed.weight, target.resolve(passed.logits).indices)


def find_single(value: Tensor) -> int | None:
    """Return the dimension of the only image: the first of size 1, if it is where a batch can be."""
    return next((side for side, size in enumerate(value.shape[: 1 if value.ndim == 4 else 2]) if size == 1), None)


def _place(amount: Tensor, name: str, side: int | None, size: Sequence[int]) -> Contribution:
    """Find the places of a constant's contributions by their shape and the layout of the function that added it.

    Args:
        amount: value times derivative, in the constant's shape; the channels of tokens may be summed.
        name: of the function.
        side: its batch dimension; None for a constant of one image that has none.
        size: height and width of the images.
    """
    amount = amount.unsqueeze(0) if side is None else amount.movedim(side, 0)
    if side is not None and amount.ndim == 4:  # [b, D, h, w] or [b, h, w, D]
        grid = amount if _channels_first(name, amount, size) else amount.movedim(-1, 1)
        if _is_grid(grid.shape[2], grid.shape[3], size):
            return Contribution(grid, amount[:, :0])
    elif side is not None and amount.ndim == 3 and name not in _CHANNELS_FIRST:  # [b, N, D]
        rows, columns = find_token_grid(amount.shape[1], size) or (1, 1)
        before = amount.shape[1] - rows * columns  # class and register tokens come first
        return Contribution(amount[:, before:].mT.unflatten(2, (rows, columns)), amount[:, :before])
    return Contribution(None, amount)


def _channels_first(name: str, amount: Tensor, size: Sequence[int]) -> bool:
    if name in _CHANNELS_FIRST or name in _CHANNELS_LAST:
        return name in _CHANNELS_FIRST
    return _is_grid(amount.shape[2], amount.shape[3], size) and not _is_grid(amount.shape[1], amount.shape[2], size)


def _is_grid(rows: int, columns: int, size: Sequence[int]) -> bool:
    """Return whether a map has the image's aspect ratio, up to a cropped row, and no more places than pixels."""
    return abs(rows * size[1] - columns * size[0]) <= max(size) and rows <= size[0] and columns <= size[1]


def spread_evenly(grid: Tensor, size: Sequence[int]) -> Tensor:
    """Resize maps ``[..., h, w]`` with the same sum: each value is divided evenly among the pixels of its place."""
    shares = []
    for extent, pixels in zip(grid.shape[-2:], size, strict=True):
        place = torch.arange(pixels, device=grid.device) * extent // pixels
        starts = (torch.arange(extent + 1, device=grid.device) * pixels + extent - 1) // extent
        shares.append((place, starts.diff()))
    (row, high), (column, wide) = shares
    return (grid / (high[:, None] * wide))[..., row, :][..., column]


def per_channel(maps: Tensor, channels: int) -> Tensor:
    """Divide maps ``[..., H, W]`` evenly among channels: attributions ``[..., C, H, W]`` whose channel sum they are."""
    return (maps / channels).unsqueeze(-3).expand(*maps.shape[:-2], channels, *maps.shape[-2:])


def to_explanation(maps: Tensor, images: Tensor, target: Target) -> Explanation:
    """Return maps ``[b, K, H, W]`` as an explanation, divided evenly among the channels."""
    attribution = per_channel(maps, images.shape[1]).to(images.dtype).contiguous()  # [b, K, C, H, W]
    return Explanation(attribution, target.indices)


def sum_maps(maps: Iterable[Tensor], direct: Tensor) -> Tensor:
    """Add up maps ``[b, H, W]`` in the widest type; returns attributions ``[b, C, H, W]`` like ``direct``."""
    total = sum(maps, torch.zeros_like(direct[:, 0], dtype=precise_dtype(direct.device)))
    return per_channel(total, direct.shape[1]).to(direct.dtype)


def upsample(grids: Tensor, size: Sequence[int]) -> Tensor:
    """Enlarge grids ``[b, D, h, w]`` bilinearly to maps ``[b, D, H, W]``."""
    return torch.nn.functional.interpolate(grids, tuple(size), mode="bilinear", align_corners=False)


def scale_to_unit(maps: Tensor) -> Tensor:
    """Scale each of the maps ``[..., H, W]`` to the range from 0 to 1; a constant one becomes zero."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    return (maps - low) / torch.where(high > low, high - low, 1)


def sum_channels(constant: RecordedConstant, slope: Tensor) -> Tensor:
    """Return value times derivative; of tokens, the sum over channels ``[b, N, 1]``, which is all that a map needs."""
    value = constant.value
    if value.ndim != 3 or constant.function in _CHANNELS_FIRST:
        return value * slope
    if not any(value.stride()[:2]):  # one value for each channel
        return (slope @ value[0, 0].to(slope.dtype)).unsqueeze(-1)
    return (value * slope).sum(-1, keepdim=True)


def place_constants(constants: Sequence[tuple[Constant, int]], like: Tensor) -> Tensor:
    """Return the contributions of the constants that have a place in the image, as maps ``[b, H, W]``.

    Args:
        constants: with what ``sum_channels`` returns instead of their derivatives, and with their batch dimensions.
        like: maps of this shape.
    """
    size, grids = (like.shape[-2], like.shape[-1]), dict[torch.Size, list[Tensor]]()
    lengths = {constant.value.shape[1 - side] for constant, side in constants if constant.value.ndim == 3 and side < 2}
    for constant, side in constants:
        if constant.value.ndim == 4 and set(constant.value.shape[-2:]) <= lengths:
            continue  # between tokens and tokens, as a position bias of attention
        grid = _place(constant.derivative[0], constant.function, side, size).grid
        if grid is not None:
            summed = grid.sum(1)
            grids.setdefault(summed.shape, []).append(summed)
    joined = (torch.stack(alike).sum(0) for alike in grids.values())  # in few kernels
    return sum((spread_evenly(grid, size) for grid in joined), torch.zeros_like(like))
