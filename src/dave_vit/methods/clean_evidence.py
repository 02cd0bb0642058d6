"""The evidence of the clean image: its pixels, and the model's additive constants at their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dave_vit.engine.batch_axes import Axes, find_batch_axes
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.gradient import Constant, gradient
from dave_vit.engine.rule_sets.lrp import ATTENTION_RELEVANCE
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import Method
from dave_vit.methods.bias_placement import CONSTANT_ROWS, spread_evenly, sum_by_place
from dave_vit.methods.memory import PassForm
from dave_vit.methods.pass_size import PassSize


def compute_clean_evidence(method: Method, images: Tensor, target: Target, rules: RuleSet, rows: PassSize) -> Tensor:
    """Compute the maps that a reducer takes beside the samples.

    Args:
        method: gives the model and its precision.
        images: ``[b, C, H, W]``; clips have T before C.
        target: resolved.
        rules: the method's own.
        rows: images in one pass, and no more than constants allow.

    Returns:
        ``[b, K, 2, 2, H, W]``, of clips with T after K: by the method's rules and by AttnLRP's; of the pixels, and of
        the constants. A model that AttnLRP's rules do not cover has the first twice.
    """
    most = CONSTANT_ROWS.get(images.device.type, CONSTANT_ROWS["cpu"])

    def compute(rules: RuleSet, step: int, start: int, stop: int) -> Tensor:
        chunks = [slice(at, min(at + step, stop)) for at in range(start, stop, step)]
        is_alone = min(rows.rows, step) == 1
        parts = [_Chunk(images[at], target.part(at.start, at.stop), is_alone) for at in chunks]
        return torch.cat([_evidence(method, part, rules) for part in parts])

    def evidence(rules: RuleSet) -> Tensor:
        form = PassForm(method.model, "constants", rules, method.autocast, target.read)
        step = rows.limit_rows(most, form, images)
        return torch.cat(rows.run_chunks(partial(compute, rules, step), len(images)))

    own = evidence(rules)
    try:
        return torch.stack([own, evidence(ATTENTION_RELEVANCE)], -4)
    except UnsupportedOperator:
        return torch.stack([own, own], -4)


@dataclass(frozen=True)
class _Chunk:
    """Images of one pass.

    Attributes:
        images: ``[b, C, H, W]``.
        target: of each of them.
        is_alone: whether there is no memory for two images, so that constants are those of the only one.
    """

    images: Tensor
    target: Target
    is_alone: bool


def _evidence(method: Method, chunk: _Chunk, rules: RuleSet) -> Tensor:
    """Return maps of pixels and of constants by one rule set, ``[b, K, 2, H, W]``."""
    images, target = chunk.images, chunk.target
    run = getattr(method.model, "_orig_mod", method.model)  # the images were checked already
    compute = partial(gradient, method.model, images, target, rules=rules, autocast=method.autocast, run=run)
    if images.ndim > 4:  # where a constant acts in a clip is not known
        pixels = (compute().weight * images.unsqueeze(1)).sum(-3)
        return torch.stack([pixels, torch.zeros_like(pixels)], -3)
    axes: Axes = []
    if not chunk.is_alone:
        axes = find_batch_axes(method.model, images, target, rules=rules, autocast=method.autocast)

    def combine(weight: Tensor, constants: Sequence[Constant]) -> Tensor:
        sides = [_find_single(constant.value) for constant in constants] if chunk.is_alone else axes or []
        pairs = [(constant, side) for constant, side in zip(constants, sides, strict=False) if side is not None]
        pixels = (weight * images).sum(1)
        return torch.stack([pixels, place_constants(pairs, pixels)], 1)

    return compute(combine=combine).weight


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
