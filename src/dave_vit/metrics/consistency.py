"""Whether the map of a slightly moved image is the moved map."""

from __future__ import annotations

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.errors import InputError
from dave_vit.maps import positive
from dave_vit.metrics.base import METRICS, Case, Metric, Scores
from dave_vit.models.traits import traits_of
from dave_vit.neighborhood import Warp, affine_matrix

_SIDE = 224  # the shifts of the paper's figure 2 are pixels of an image of this side


def small_warp(size: tuple[int, int], *, rotation: float = 5.0, shift: tuple[float, float] = (20.0, 8.0)) -> Warp:
    """A small movement, to be made alike for all images of a batch.

    Args:
        size: (H, W).
        rotation: degrees.
        shift: pixels to the right and down in an image of 224 pixels; in proportion in others.
    """
    pixels = torch.tensor([[shift[0] * size[1] / _SIDE, shift[1] * size[0] / _SIDE]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    still = torch.zeros(1, dtype=torch.bool)
    matrix = affine_matrix(size, flip=still, rotation=rotation * one, scale=one, translation=pixels)
    return Warp(matrix, torch.zeros(1, 2, dtype=torch.int64))


def warp_images(images: Tensor, warp: Warp, *, fill: float = 0.0) -> Tensor:
    """All images of a batch moved alike, and filled up with a colour: [B,C,H,W] -> [B,C,H,W]."""
    channels = images.flatten(0, 1)[None]  # of one image: one grid for all
    return warp.apply(channels, fill=fill)[0].view_as(images)


def consistency(maps: Tensor, others: Tensor, warp: Warp) -> Tensor:
    """Correlation of the positive parts of maps and of the maps of moved images, moved back: [B].

    Args:
        maps: of the images, [B,H,W].
        others: of the moved images, [B,H,W].
        warp: how they were moved, all alike.

    Returns:
        Pearson's coefficient over the pixels that the moved image still shows; NaN where a map is constant there or
        not finite.
    """
    if maps.ndim != 3 or maps.shape != others.shape:
        raise InputError(f"maps shaped {list(maps.shape)} and {list(others.shape)}; expected the same [B,H,W]")
    back = warp.inverse(positive(others)[None])[0]
    kept = warp.inverse(warp.apply(torch.ones_like(maps[:1])[None]))[0] > 1 - 1e-4  # neither way touched the outside
    wide = precise_dtype(maps.device)
    return correlation(positive(maps).to(wide), back.to(wide), kept)


def correlation(first: Tensor, second: Tensor, where: Tensor) -> Tensor:
    """Pearson's coefficient of each pair over the pixels marked: [B,H,W] -> [B]; NaN where one is constant there.

    ``where`` may have one image for all.
    """
    finite = (first.isfinite() & second.isfinite()).flatten(1).all(1)
    weight = where.flatten(1).to(first.dtype)
    (a, flat_a), (b, flat_b) = (_centred(part.flatten(1), weight) for part in (first, second))
    product = (a * b).sum(1) / (a.square().sum(1).sqrt() * b.square().sum(1).sqrt())
    return torch.where(finite & ~flat_a & ~flat_b, product, torch.nan)


def _centred(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values [B,N] without their mean, 0 where the weight is; and whether only rounding is left of them, [B]."""
    centred = (values - (values * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)) * weight
    left = centred.square().sum(1)
    return centred, left <= 1e-20 * (values * weight).square().sum(1)


@METRICS.register("consistency")
class Consistency(Metric):
    """Consistency under a small augmentation (figure 2 of the paper as a number).

    Args:
        rotation: degrees.
        shift_x: pixels to the right, of 224.
        shift_y: pixels down, of 224.
    """

    summary = "Correlation of the map with the map of a slightly turned and shifted image, moved back."

    def __init__(self, rotation: float = 5.0, shift_x: float = 20.0, shift_y: float = 8.0) -> None:
        self.rotation, self.shift = rotation, (shift_x, shift_y)

    def score(self, case: Case) -> Scores:
        """[B]."""
        size = (case.inputs.shape[2], case.inputs.shape[3])
        warp = small_warp(size, rotation=self.rotation, shift=self.shift)
        others = case.explain(case.model, warp_images(case.inputs, warp, fill=traits_of(case.model).fill), case.target)
        return Scores(consistency(case.maps, others, warp))

    def reason(self, case: Case, index: int) -> str:
        """Why a map has no score."""
        return "map is constant" if case.maps[index].isfinite().all() else "map is not finite"
