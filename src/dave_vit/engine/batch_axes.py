"""Find the batch dimension of every additive constant of a model, by comparing passes; results are cached."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fingerprint import fingerprint_model
from dave_vit.engine.forward import count_passes
from dave_vit.engine.gradient import Constant, gradient
from dave_vit.engine.targets import Target

_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], list[int] | None]] = WeakKeyDictionary()
_LIKE = 0.05  # of the largest derivative; those of another image differ by as much as they are


def find_batch_axes(
    model: nn.Module, images: Tensor, target: Target, *, rules: RuleSet, autocast: torch.dtype | None
) -> list[int] | None:
    """Return the batch dimension of each recorded constant, or None if a batch cannot be separated by image.

    An image is explained alone and in its batch. In a dimension that grows from 1 to the size of the batch lie the
    images, if the constants of this one lie at its place in the batch; other dimensions, as of windows, or images that
    change their places, cannot be separated.
    """
    if target.score is not None:  # which may add what it likes
        return None
    state = fingerprint_model(model).structure
    key = (state, rules.name, images.shape, images.dtype, images.device, autocast)
    known = _KNOWN.get(model, {})
    if key in known:
        return known[key]
    axes = _compare_passes(model, images, target, rules, autocast)
    if not bool((images[:-1] == images[-1:]).all()):  # copies do not show whether they change their places
        _KNOWN[model] = {**{old: entry for old, entry in known.items() if old[0] == state}, key: axes}
    return axes


def _compare_passes(
    model: nn.Module, images: Tensor, target: Target, rules: RuleSet, autocast: torch.dtype | None
) -> list[int] | None:
    last, target = len(images) - 1, target.split_classes()[0]  # one class is enough
    recorded = partial(gradient, model, rules=rules, autocast=autocast, record_constants=True)
    with count_passes():  # a check of the model, which is no pass of a map
        alone = recorded(images[last:], target.part(last, last + 1)).constants
        together = recorded(images, target).constants
    if len(alone) != len(together):
        return None
    axes = [_find_axis(*pair, batch=len(images)) for pair in zip(alone, together, strict=True)]
    known = [side for side in axes if side is not None]
    return known if len(known) == len(axes) else None


def _find_axis(alone: Constant, together: Constant, *, batch: int) -> int | None:
    """Return the only dimension that grows, from 1 to the size of the batch, if the last image is last in it."""
    one, all_ = alone.derivative[0], together.derivative[0]
    if one.ndim != all_.ndim:
        return None
    grown = [side for side in range(one.ndim) if one.shape[side] != all_.shape[side]]
    if len(grown) != 1 or (one.shape[grown[0]], all_.shape[grown[0]]) != (1, batch):
        return None
    there = all_.select(grown[0], batch - 1).unsqueeze(grown[0])
    return grown[0] if bool(((there - one).abs() <= _LIKE * one.abs().amax()).all()) else None
