"""Additive constants of a model (biases, position embeddings, class tokens), at the places where they act."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine import RuleSet, Target
from dave_vit.engine.fast.compiled import RecordedGradient, target_tensors
from dave_vit.engine.fast.cuda_graphs import BatchFunction, run_both
from dave_vit.engine.gradient import Axes, Constant, find_batch_axes, gradient
from dave_vit.engine.observation import find_token_grid
from dave_vit.engine.rule_sets import ATTENTION_RELEVANCE
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import Method
from dave_vit.methods.explanation import Explanation, join_explanations
from dave_vit.methods.pass_size import PassForm, PassSize

_CHANNELS_FIRST = frozenset(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution batch_norm group_norm
    instance_norm""".split()
)
CONSTANT_ROWS = {"cuda": 16, "cpu": 8}
"""Rows of one pass: all constants and their derivatives are kept."""
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
        sides = axes or [_find_single(constant.value) for constant in constants]
        dtype, size = precise_dtype(images.device), images.shape[-2:]
        pairs = zip(constants, sides, strict=True)  # one at a time, since contributions are large
        return make(weight * images, (_place_constant(constant, side, size, dtype) for constant, side in pairs))

    passed = gradient(model, images, target, rules=rules, autocast=autocast, combine=combine)
    return Explanation(passed.weight, target.resolve(passed.logits).indices)


def _find_single(value: Tensor) -> int | None:
    """Return the dimension of the only image: the first of size 1, if it is where a batch can be."""
    return next((side for side, size in enumerate(value.shape[: 1 if value.ndim == 4 else 2]) if size == 1), None)


def _place_constant(
    constant: Constant, side: int | None, size: Sequence[int], dtype: torch.dtype | None = None
) -> Contribution:
    """Find the places of a constant's values by its shape and the layout of the function that added it.

    Args:
        constant: with its derivative.
        side: its batch dimension; None for a constant of one image that has none.
        size: height and width of the images.
        dtype: of the contribution; that of the constant by default.
    """
    name, amount = constant.function, constant.value * constant.derivative[0]
    amount = amount.to(dtype or amount.dtype)
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
    total = torch.zeros_like(direct[:, 0], dtype=precise_dtype(direct.device))
    for each in maps:
        total = total + each
    return per_channel(total, direct.shape[1]).to(direct.dtype)


def upsample(grids: Tensor, size: Sequence[int]) -> Tensor:
    """Enlarge grids ``[b, D, h, w]`` bilinearly to maps ``[b, D, H, W]``."""
    return torch.nn.functional.interpolate(grids, tuple(size), mode="bilinear", align_corners=False)


def scale_to_unit(maps: Tensor) -> Tensor:
    """Scale each of the maps ``[..., H, W]`` to the range from 0 to 1; a constant one becomes zero."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    return (maps - low) / torch.where(high > low, high - low, 1)


Resolve = Callable[[Target, Tensor], Target]
"""Function of the target of some images and their logits ``[b, classes]`` to the resolved target."""


def keep_target(target: Target, logits: Tensor) -> Target:
    """Return a target that is resolved already."""
    return target


def resolve_by_evidence(
    method: Method,
    images: Tensor,
    target: Target,
    rules: RuleSet,
    rows: PassSize,
    resolve: Resolve,
    *,
    shift: int,
    passes: RecordedGradient | None = None,
) -> tuple[Tensor, Target, Tensor]:
    """Compute the maps that a reducer takes beside the samples; resolve the target on the same forward pass.

    Args:
        method: gives the model and its precision.
        images: ``[b, C, H, W]``; clips have T before C.
        target: what is explained of them.
        rules: the method's own.
        rows: images in one pass, and no more than constants allow.
        resolve: resolves the target on the logits.
        shift: pixels by which a copy of each image is moved down and to the right: half of a patch.
        passes: of the method; classes of images on a GPU are then explained by passes that can be captured, for which
            the target is resolved first.

    Returns:
        Maps ``[b, K, 2, 3, H, W]``, of clips with T after K: by the method's rules and by AttnLRP's; of the pixels, of
        the constants, and of the pixels of the moved copy, moved back; the resolved target; logits ``[b, classes]``. A
        model that AttnLRP's rules do not cover has the first maps twice.
    """
    logits, most = None, CONSTANT_ROWS.get(images.device.type, CONSTANT_ROWS["cpu"]) // 2  # for an image and its copy
    if passes is not None and images.is_cuda and images.ndim == 4 and target.score is None:
        logits = torch.cat(rows.run_chunks(lambda start, stop: passes.logits(images[start:stop]), len(images)))
        target, resolve = resolve(target, logits), keep_target
    form = PassForm(method.model, "constants", rules, method.autocast, target.read)

    def compute(start: int, stop: int) -> tuple[Tensor, Tensor]:
        fitting = rows.limit_rows(2 * most, form, images)
        step, parts = max(1, fitting // 2), []
        is_alone = min(rows.rows, fitting) == 1  # no memory for two rows: constants are those of the only one
        for at in range(start, stop, step):
            end = min(at + step, stop)
            part = images[at:end], target.part(at, end)
            if passes is not None and logits is not None and not is_alone:
                is_all = end - at == len(images)
                parts.append((_captured_evidence(method, *part, rules, shift, passes, beside=is_all), logits[at:end]))
            else:
                parts.append(_evidence_of_both(method, *part, rules, shift, resolve, is_alone=is_alone))
        return _join(parts)

    evidence, logits_of_all = _join(rows.run_chunks(compute, len(images)))
    return evidence, resolve(target, logits_of_all), logits_of_all


def _captured_evidence(
    method: Method,
    images: Tensor,
    target: Target,
    rules: RuleSet,
    shift: int,
    passes: RecordedGradient,
    *,
    beside: bool = False,
) -> Tensor:
    """Return the maps of both rule sets ``[b, K, 2, 3, H, W]`` for a resolved target, by a graph where there is one."""

    def prepare(_: Tensor) -> BatchFunction:
        nonzero: tuple[list[bool], list[bool]] = ([], [])

        def function(images: Tensor, columns: Tensor, *weights: Tensor) -> tuple[Tensor]:
            own = Target(columns, weights=weights[0] if weights else None, classes=target.classes)
            return (_evidence_of_both(method, images, own, rules, shift, nonzero=nonzero)[0],)

        return function

    def compute() -> tuple[Tensor]:
        return (_evidence_of_both(method, images, target, rules, shift)[0],)

    return passes.captures.run("evidence", prepare, target_tensors(images, target), compute, beside=beside)[0]


def _evidence_of_both(
    method: Method,
    images: Tensor,
    target: Target,
    rules: RuleSet,
    shift: int,
    resolve: Resolve = keep_target,
    *,
    nonzero: tuple[list[bool] | None, list[bool] | None] = (None, None),
    is_alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return maps ``[b, K, 2, 3, H, W]`` by a method's rules and by AttnLRP's, if they cover the model, and logits."""
    count, moved = len(images), images.roll((shift, shift), (-2, -1))

    def repeat(target: Target) -> Target:
        return target.repeat_moved(2, images, lambda mask: torch.stack([mask, mask.roll((shift, shift), (-2, -1))]))

    def resolve_images(_: Target, logits: Tensor) -> Target:
        return repeat(resolve(target, logits[:count]))

    compute = partial(_evidence_by_rules, method, rules=rules, nonzero=nonzero, is_alone=is_alone)
    if is_alone:
        own, logits, resolved = compute(images, target, resolve=resolve)
        copy, _, _ = compute(moved, repeat(resolved).part(count, 2 * count), resolve=keep_target)
    else:
        maps, logits, _ = compute(torch.cat([images, moved]), repeat(target), resolve=resolve_images)
        own, copy = maps.split(count)
    pixels = copy[..., :1, :, :].roll((-shift, -shift), (-2, -1))
    return torch.cat([own, pixels], -3), logits[:count]


def _evidence_by_rules(
    method: Method,
    images: Tensor,
    target: Target,
    rules: RuleSet,
    resolve: Resolve,
    nonzero: tuple[list[bool] | None, list[bool] | None],
    *,
    is_alone: bool,
) -> tuple[Tensor, Tensor, Target]:
    """Return maps ``[b, K, 2, 2, H, W]`` by a method's rules and by AttnLRP's, logits, and the resolved target."""
    compute, resolved = partial(_evidence, method, images, is_alone=is_alone), [target]

    def resolve_once(target: Target, logits: Tensor) -> Target:
        resolved[:] = [resolve(target, logits)]  # which may wait for the device
        return resolved[0]

    def compute_other() -> Tensor | None:
        with suppress(UnsupportedOperator):
            return compute(resolved[0], ATTENTION_RELEVANCE, keep_target, nonzero=nonzero[1])[0]
        return None

    (own, logits), other = run_both(lambda: compute(target, rules, resolve_once, nonzero=nonzero[0]), compute_other)
    return torch.stack([own, own if other is None else other], -4), logits, resolved[0]


def _join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate evidence and logits of several passes."""
    evidence, logits = (torch.cat(column) for column in zip(*parts, strict=True))
    return evidence, logits


def _evidence(
    method: Method,
    images: Tensor,
    target: Target,
    rules: RuleSet,
    resolve: Resolve,
    *,
    is_alone: bool = False,
    nonzero: list[bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return maps of pixels and of constants by one rule set, ``[b, K, 2, H, W]``, and logits ``[b, classes]``."""
    run = getattr(method.model, "_orig_mod", method.model)  # the images were checked already
    compute = partial(gradient, method.model, images, target, rules=rules, autocast=method.autocast)
    compute = partial(compute, run=run, resolve=partial(resolve, target), nonzero=nonzero)
    if images.ndim > 4:  # where a constant acts in a clip is not known
        passed = compute()
        pixels = (passed.weight * images.unsqueeze(1)).sum(-3)
        return torch.stack([pixels, torch.zeros_like(pixels)], -3), passed.logits
    axes: Axes = []
    if not is_alone:
        axes = find_batch_axes(method.model, images, target, rules=rules, autocast=method.autocast)

    def combine(weight: Tensor, constants: Sequence[Constant]) -> Tensor:
        sides = [_find_single(constant.value) for constant in constants] if is_alone else axes or []
        pairs = [(constant, side) for constant, side in zip(constants, sides, strict=False) if side is not None]
        pixels = (weight * images).sum(1)
        return torch.stack([pixels, place_constants(pairs, pixels)], 1)

    passed = compute(combine=combine)
    return passed.weight, passed.logits


def place_constants(constants: Sequence[tuple[Constant, int]], like: Tensor) -> Tensor:
    """Return the contributions of the constants that have a place in the image, as maps ``[b, H, W]``.

    Args:
        constants: with their batch dimensions.
        like: maps of this shape.
    """
    size, grids = (like.shape[-2], like.shape[-1]), dict[torch.Size, list[Tensor]]()
    lengths = {constant.value.shape[1 - side] for constant, side in constants if constant.value.ndim == 3 and side < 2}
    for constant, side in constants:
        if constant.value.ndim == 4 and set(constant.value.shape[-2:]) <= lengths:
            continue  # between tokens and tokens, as a position bias of attention
        grid = _place_constant(constant, side, size).grid
        if grid is not None:
            summed = grid.sum(1)
            grids.setdefault(summed.shape, []).append(summed)
    joined = (torch.stack(alike).sum(0) for alike in grids.values())  # in few kernels
    return sum((spread_evenly(grid, size) for grid in joined), torch.zeros_like(like))
