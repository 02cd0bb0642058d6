"""Consistency: whether the map of a slightly moved image is the moved map."""

from __future__ import annotations

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.errors import InputError
from dave_vit.maps import positive
from dave_vit.metrics.base import CONSTANT, METRICS, Case, Metric, Scores
from dave_vit.metrics.localization import last_equal_index
from dave_vit.models.traits import traits_of
from dave_vit.neighborhood import Warp, affine_matrix

_SIDE = 224  # the shifts of the paper's figure 2 are pixels of an image of this side


def small_warp(size: tuple[int, int], *, rotation: float = 5.0, shift: tuple[float, float] = (20.0, 8.0)) -> Warp:
    """Return a small rotation and shift, the same for all images of a batch.

    Args:
        size: (H, W).
        rotation: in degrees.
        shift: to the right and down, in pixels of an image of 224 pixels; scaled in proportion for others.
    """
    pixels = torch.tensor([[shift[0] * size[1] / _SIDE, shift[1] * size[0] / _SIDE]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    still = torch.zeros(1, dtype=torch.bool)
    matrix = affine_matrix(size, flip=still, rotation=rotation * one, scale=one, translation=pixels)
    return Warp(matrix, torch.zeros(1, 2, dtype=torch.int64))


def warp_images(images: Tensor, warp: Warp, *, fill: float = 0.0) -> Tensor:
    """Move all images of a batch alike, with a fill colour outside: [B,C,H,W] -> [B,C,H,W]."""
    channels = images.flatten(0, 1)[None]  # as channels of one image, which share one sampling grid
    return warp.apply(channels, fill=fill)[0].view_as(images)


def consistency(maps: Tensor, others: Tensor, warp: Warp) -> Tensor:
    """Correlate the positive parts of maps with those of moved images, moved back: [B].

    Args:
        maps: maps of the images, [B,H,W].
        others: maps of the moved images, [B,H,W].
        warp: the movement, the same for all.

    Returns:
        Pearson's coefficient over the pixels that the moved image still shows; NaN where a map is constant there or
        not finite.
    """
    if maps.ndim != 3 or maps.shape != others.shape:
        raise InputError(f"maps shaped {list(maps.shape)} and {list(others.shape)}; expected the same [B,H,W]")
    back = warp.inverse(positive(others)[None])[0]
    visible = warp.inverse(warp.apply(torch.ones_like(maps[:1])[None]))[0] > 1 - 1e-4  # untouched by the outside
    wide = precise_dtype(maps.device)
    return correlation(positive(maps).to(wide), back.to(wide), visible)


def correlation(first: Tensor, second: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return Pearson's coefficient of each pair over the pixels of a mask: [B,H,W] -> [B]; NaN if one is constant.

    ``mask`` is [B,H,W], or [1,H,W] for all; by default every pixel counts.
    """
    finite = (first.isfinite() & second.isfinite()).flatten(1).all(1)
    weight = (torch.ones_like(first[:1]) if mask is None else mask).flatten(1).to(first.dtype)
    (a, constant_a), (b, constant_b) = (_center(part.flatten(1), weight) for part in (first, second))
    product = (a * b).sum(1) / (a.square().sum(1).sqrt() * b.square().sum(1).sqrt())
    return torch.where(finite & ~constant_a & ~constant_b, product, torch.nan)


def mean_ranks(maps: Tensor) -> Tensor:
    """Return the ranks of the pixels [B,H,W], equal ones at their mean rank; NaN for a map that is not finite."""
    ordered, order = maps.flatten(1).sort(1)
    first = ordered.shape[1] - 1 - last_equal_index(ordered.flip(1)).flip(1)
    middle = (first + last_equal_index(ordered)).to(precise_dtype(maps.device)) / 2
    ranks = torch.empty_like(middle).scatter_(1, order, middle).view(maps.shape)
    return torch.where(maps.isfinite().all(-1).all(-1)[:, None, None], ranks, torch.nan)


def _center(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the mean of values [B,N], zero where the weight is; also return whether only rounding remains, [B]."""
    centred = (values - (values * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)) * weight
    energy = centred.square().sum(1)
    return centred, energy <= 1e-20 * (values * weight).square().sum(1)


@METRICS.register("consistency")
class Consistency(Metric):
    """Consistency under a small augmentation (figure 2 of the paper as a number).

    Args:
        rotation: in degrees.
        shift_x: to the right, in pixels of 224.
        shift_y: down, in pixels of 224.
    """

    summary = "Correlation of the map with the map of a slightly turned and shifted image, moved back."
    bounds = (-1.0, 1.0)
    unscored = CONSTANT

    def __init__(self, rotation: float = 5.0, shift_x: float = 20.0, shift_y: float = 8.0) -> None:
        self.rotation, self.shift = rotation, (shift_x, shift_y)

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        warp = small_warp(case.size, rotation=self.rotation, shift=self.shift)
        others = case.explain(case.model, warp_images(case.inputs, warp, fill=traits_of(case.model).fill), case.target)
        return Scores(consistency(case.maps, others, warp))
