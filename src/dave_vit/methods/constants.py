"""Additive constants of a model (biases, position embeddings, class tokens), at the places where they act."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.conservation import Axes, find_batch_axes
from dave_vit.engine.gradient import Constant, gradient
from dave_vit.engine.observation import find_token_grid
from dave_vit.engine.rule_sets import ATTENTION_RELEVANCE
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import Method
from dave_vit.methods.explanation import Explanation, join_explanations
from dave_vit.methods.memory import PassForm
from dave_vit.methods.pass_size import PassSize

_CHANNELS_FIRST = frozenset(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution batch_norm group_norm
    instance_norm""".split()
)
CONSTANT_ROWS = {"cuda": 32, "cpu": 8}
"""Images in one pass: all constants and their derivatives are kept."""
_CHANNELS_LAST = frozenset("linear layer_norm rms_norm".split())


@dataclass(frozen=True)
class Contribution:
    """Contribution of one additive constant to the score, value by value.

    Attributes:
        grid: by channel and place ``[D, h, w]``; None where the constant has no place in the image.
        elsewhere: the sum of what has no place, such as the class token's share.
    """

    grid: Tensor | None
    elsewhere: Tensor

    def spread(self, size: tuple[int, int]) -> Tensor:
        """Return a map ``[H, W]`` with the same sum, or one value ``[]`` for all pixels if nothing has a place."""
        rest = self.elsewhere / math.prod(size)
        return rest if self.grid is None else rest + spread_evenly(self.grid.sum(0), size)


Make = Callable[[Tensor, Iterable[Contribution]], Tensor]
"""Function from weight times image ``[C, H, W]`` and the contributions to the attribution of one image."""


def attributions(method: Method, images: Tensor, target: Target, make: Make, rules: RuleSet) -> Explanation:
    """Compute attributions that include every additive constant at its place in its own image.

    A batch takes one pass if the batch dimension of every constant is known. Windows hide it: images of such models are
    explained one at a time.

    Args:
        method: gives the model and its precision.
        images: ``[b, C, H, W]``.
        target: what is explained of them.
        make: the attribution of one image.
        rules: the derivatives, and which constants are recorded.
    """
    model, autocast = method.model, method.autocast
    axes = find_batch_axes(model, images, target, rules=rules, autocast=autocast) if len(images) > 1 else []
    sides = [side for side in axes or [] if side is not None]
    if axes is None or len(sides) < len(axes):
        singles = range(len(images))
        return join_explanations(
            [attributions(method, images[i : i + 1], target.part(i, i + 1), make, rules) for i in singles]
        )

    def combine(weight: Tensor, constants: Sequence[Constant]) -> Tensor:
        return _combine(weight * images, constants, images, make, sides)

    passed = gradient(model, images, target, rules=rules, autocast=autocast, combine=combine)
    return Explanation(passed.weight, target.resolve(passed.logits).indices)


def _combine(direct: Tensor, constants: Sequence[Constant], images: Tensor, make: Make, sides: Sequence[int]) -> Tensor:
    """Compute the attributions of a batch for one class: ``[b, C, H, W]``."""
    functions = [constant.function for constant in constants]
    parts = [(constant.value, constant.derivative[0]) for constant in constants]
    if len(images) == 1:
        return make(direct[0], _contributions(functions, parts, images))[None]

    def one(direct: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        alone = [tuple(part.unsqueeze(side) for part in pair) for pair, side in zip(parts, sides, strict=True)]
        return make(direct, _contributions(functions, alone, images))

    attribution: Tensor = torch.vmap(one, in_dims=(0, [(side, side) for side in sides]))(direct, parts)
    return attribution


def _contributions(functions: list[str], parts: list[Any], images: Tensor) -> Iterator[Contribution]:
    """Yield the contribution of each constant to one image; one at a time, since they are large."""
    for function, (value, derivative) in zip(functions, parts, strict=True):
        amount = torch.where(derivative == 0, 0.0, value * derivative)  # a mask may be -inf
        yield _place_constant(function, amount.to(precise_dtype(images.device)), (images.shape[-2], images.shape[-1]))


def _place_constant(name: str, amount: Tensor, size: tuple[int, int]) -> Contribution:
    """Find the places of a constant's values by its shape and the layout of the function that added it."""
    if amount.ndim == 4 and len(amount) == 1:  # [1, D, h, w] or [1, h, w, D]
        grid = amount[0] if _channels_first(name, amount, size) else amount[0].movedim(-1, 0)
        if _is_grid(grid.shape[1], grid.shape[2], size):
            return Contribution(grid, amount.new_zeros(()))
    elif amount.ndim == 3 and 1 in amount.shape[:2] and name not in _CHANNELS_FIRST:  # [1, N, D] or [N, 1, D]
        tokens = amount.flatten(0, 1).T  # [D, N]
        rows, columns = find_token_grid(tokens.shape[1], size) or (1, 1)
        before = tokens.shape[1] - rows * columns  # class and register tokens come first
        return Contribution(tokens[:, before:].unflatten(1, (rows, columns)), tokens[:, :before].sum())
    return Contribution(None, amount.sum())


def sum_by_place(name: str, amount: Tensor, size: tuple[int, int]) -> Tensor | None:
    """Sum the contributions of a constant ``[b, ...]`` over channels: ``[b, h, w]``, or None if it has no place."""
    if amount.ndim == 4:  # [b, D, h, w] or [b, h, w, D]
        grid = amount.sum(1 if _channels_first(name, amount, size) else 3)
        return grid if _is_grid(grid.shape[1], grid.shape[2], size) else None
    if amount.ndim == 3 and name not in _CHANNELS_FIRST:  # [b, N, D]
        rows, columns = find_token_grid(amount.shape[1], size) or (1, 1)
        tokens = amount.sum(2)[:, amount.shape[1] - rows * columns :]  # class and register tokens come first
        return tokens.reshape(-1, rows, columns)
    return None


def _channels_first(name: str, amount: Tensor, size: tuple[int, int]) -> bool:
    if name in _CHANNELS_FIRST or name in _CHANNELS_LAST:
        return name in _CHANNELS_FIRST
    return _is_grid(amount.shape[2], amount.shape[3], size) and not _is_grid(amount.shape[1], amount.shape[2], size)


def _is_grid(rows: int, columns: int, size: tuple[int, int]) -> bool:
    """Return whether a map has the image's aspect ratio, up to a cropped row, and no more places than pixels."""
    return abs(rows * size[1] - columns * size[0]) <= max(size) and rows <= size[0] and columns <= size[1]


def spread_evenly(grid: Tensor, size: tuple[int, int]) -> Tensor:
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


def sum_maps(maps: Iterable[Tensor], direct: Tensor) -> Tensor:
    """Add up maps ``[H, W]`` in the widest type; returns an attribution ``[C, H, W]`` like ``direct``."""
    total = torch.zeros_like(direct[0], dtype=precise_dtype(direct.device))
    for each in maps:
        total = total + each
    return per_channel(total, len(direct)).to(direct.dtype)


def upsample(grids: Tensor, size: Sequence[int]) -> Tensor:
    """Enlarge grids ``[b, D, h, w]`` bilinearly to maps ``[b, D, H, W]``."""
    return F.interpolate(grids, tuple(size), mode="bilinear", align_corners=False)


def scale_to_unit(maps: Tensor) -> Tensor:
    """Scale each of the maps ``[..., H, W]`` to the range from 0 to 1; a constant one becomes zero."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    return (maps - low) / torch.where(high > low, high - low, 1)


Resolve = Callable[[Target, Tensor], Target]
"""Function of the target of some images and their logits ``[b, classes]`` to the resolved target."""


def compute_clean_evidence(method: Method, images: Tensor, target: Target, rules: RuleSet, rows: PassSize) -> Tensor:
    """Compute the maps that a reducer takes beside the samples, of a resolved target; see ``resolve_by_evidence``."""
    return resolve_by_evidence(method, images, target, rules, rows, keep_target)[0]


def keep_target(target: Target, logits: Tensor) -> Target:
    """Return a target that is resolved already."""
    return target


def resolve_by_evidence(
    method: Method, images: Tensor, target: Target, rules: RuleSet, rows: PassSize, resolve: Resolve
) -> tuple[Tensor, Target, Tensor]:
    """Compute the maps that a reducer takes beside the samples; resolve the target on the same forward pass.

    Args:
        method: gives the model and its precision.
        images: ``[b, C, H, W]``; clips have T before C.
        target: what is explained of them.
        rules: the method's own.
        rows: images in one pass, and no more than constants allow.
        resolve: resolves the target on the logits.

    Returns:
        Maps ``[b, K, 2, 2, H, W]``, of clips with T after K: by the method's rules and by AttnLRP's; of the pixels, and
        of the constants; the resolved target; logits ``[b, classes]``. A model that AttnLRP's rules do not cover has
        the first maps twice.
    """
    most = CONSTANT_ROWS.get(images.device.type, CONSTANT_ROWS["cpu"])

    def compute(
        rules: RuleSet, target: Target, resolve: Resolve, step: int, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        chunks = [slice(at, min(at + step, stop)) for at in range(start, stop, step)]
        is_alone = min(rows.rows, step) == 1
        parts = [_Chunk(images[at], target.part(at.start, at.stop), is_alone, resolve) for at in chunks]
        return _join([_evidence(method, part, rules) for part in parts])

    def evidence(rules: RuleSet, target: Target, resolve: Resolve) -> tuple[Tensor, Tensor]:
        form = PassForm(method.model, "constants", rules, method.autocast, target.read)
        step = rows.limit_rows(most, form, images)
        return _join(rows.run_chunks(partial(compute, rules, target, resolve, step), len(images)))

    own, logits = evidence(rules, target, resolve)
    resolved = resolve(target, logits)
    try:
        other = evidence(ATTENTION_RELEVANCE, resolved, keep_target)[0]
    except UnsupportedOperator:
        other = own
    return torch.stack([own, other], -4), resolved, logits


def _join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate evidence and logits of several passes."""
    evidence, logits = (torch.cat(column) for column in zip(*parts, strict=True))
    return evidence, logits


@dataclass(frozen=True)
class _Chunk:
    """Images of one pass.

    Attributes:
        images: ``[b, C, H, W]``.
        target: of each of them.
        is_alone: whether there is no memory for two images, so that constants are those of the only one.
        resolve: resolves the target on the logits.
    """

    images: Tensor
    target: Target
    is_alone: bool
    resolve: Resolve


def _evidence(method: Method, chunk: _Chunk, rules: RuleSet) -> tuple[Tensor, Tensor]:
    """Return maps of pixels and of constants by one rule set, ``[b, K, 2, H, W]``, and logits ``[b, classes]``."""
    images, target = chunk.images, chunk.target
    run = getattr(method.model, "_orig_mod", method.model)  # the images were checked already
    resolve = partial(chunk.resolve, target)
    compute = partial(gradient, method.model, images, target, rules=rules, autocast=method.autocast)
    compute = partial(compute, run=run, resolve=resolve)
    if images.ndim > 4:  # where a constant acts in a clip is not known
        passed = compute()
        pixels = (passed.weight * images.unsqueeze(1)).sum(-3)
        return torch.stack([pixels, torch.zeros_like(pixels)], -3), passed.logits
    axes: Axes = []
    if not chunk.is_alone:
        axes = find_batch_axes(method.model, images, target, rules=rules, autocast=method.autocast)

    def combine(weight: Tensor, constants: Sequence[Constant]) -> Tensor:
        sides = [_find_single(constant.value) for constant in constants] if chunk.is_alone else axes or []
        pairs = [(constant, side) for constant, side in zip(constants, sides, strict=False) if side is not None]
        pixels = (weight * images).sum(1)
        return torch.stack([pixels, place_constants(pairs, pixels)], 1)

    passed = compute(combine=combine)
    return passed.weight, passed.logits


def _find_single(value: Tensor) -> int | None:
    """Return the dimension of the only image: the first of size 1, if it is one of the first two."""
    return next((side for side, size in enumerate(value.shape[:2]) if size == 1), None)


def place_constants(constants: Sequence[tuple[Constant, int]], like: Tensor) -> Tensor:
    """Return the contributions of the constants that have a place in the image, as maps ``[b, H, W]``.

    Args:
        constants: with their batch dimensions.
        like: maps of this shape.
    """
    size, grids = (like.shape[-2], like.shape[-1]), dict[torch.Size, Tensor]()
    lengths = {constant.value.shape[1 - side] for constant, side in constants if constant.value.ndim == 3 and side < 2}
    for constant, side in constants:
        if constant.value.ndim == 4 and set(constant.value.shape[-2:]) <= lengths:
            continue  # between tokens and tokens, as a position bias of attention
        slope = constant.derivative[0]
        amount = torch.where(slope == 0, 0.0, constant.value * slope)  # a mask may be -inf
        grid = sum_by_place(constant.function, amount.movedim(side, 0), size)
        if grid is not None:
            grids[grid.shape] = grids.get(grid.shape, 0) + grid
    return sum((spread_evenly(grid, size) for grid in grids.values()), torch.zeros_like(like))
