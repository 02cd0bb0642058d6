"""The evidence of the clean image: its pixels, and the model's additive constants at their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.conservation import Axes, find_batch_axes
from dave_vit.engine.gradient import Constant, gradient
from dave_vit.engine.rule_sets import ATTENTION_RELEVANCE
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import Method
from dave_vit.methods.bias_placement import CONSTANT_ROWS, spread_evenly, sum_by_place
from dave_vit.methods.memory import PassForm
from dave_vit.methods.pass_size import PassSize

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
