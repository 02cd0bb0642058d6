"""Occlusion: how much the score drops when a sliding window hides a part of the image."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.methods.base import METHODS, MethodInfo, check_at_least_one
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.masking import MaskingMethod, Squares, score_images, to_explanation
from dave_vit.methods.pass_size import PassSize


@METHODS.register("occlusion")
class Occlusion(MaskingMethod):
    """The drop of the score under each window; pixels under several windows get the mean of their drops.

    Args:
        model: any module that maps inputs to logits.
        window: side of the window in pixels; two patches of the model, or a seventh of the image.
        stride: pixels from one window to the next; half of the window by default.
        options: ``baseline``, ``score``, ``chunk`` and ``autocast``, as for every `MaskingMethod`.
    """

    info = MethodInfo(
        "Fall of the class's probability when a window is hidden.",
        "Zeiler and Fergus, ECCV 2014",
        "1 + windows forward",
        resolution="patch",
        unit="range",
    )

    def __init__(self, model: nn.Module, window: int | None = None, stride: int | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        self.window = check_at_least_one("window", window)
        self.stride = check_at_least_one("stride", stride)
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise OptionError(
                f"stride is {stride} and window is {window}; no pixel may be skipped, give a stride up to it"
            )

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        places = self._places(images)
        target, clean = score_images(self, images, target, pass_size, self.score)  # [b, K]

        def masks(start: int, stop: int) -> Tensor:
            shown = images.new_ones(stop - start, 1, *images.shape[-2:])
            for mask, (rows, columns) in zip(shown, places[start:stop], strict=True):
                mask[:, rows, columns] = 0
            return shown

        drops, covered = clean.new_zeros(*clean.shape, *images.shape[-2:]), clean.new_zeros(images.shape[-2:])
        for shown, scores in self._score_under_masks(images, target, pass_size, masks, len(places)):
            hidden = 1 - shown[:, 0].to(scores.dtype)  # [n, H, W]
            drops += torch.einsum("nbk,nhw->bkhw", clean - scores, hidden)
            covered += hidden.sum(0)
        return to_explanation(drops / covered, images, target)

    def _places(self, images: Tensor) -> list[tuple[slice, slice]]:
        """Return the windows; those at the right and lower edge may be cropped."""
        window = self.window or 2 * Squares.of(self.model, images, None).side
        stride = min(self.stride or max(1, window // 2), window)
        sides = [
            [slice(start, start + window) for start in range(0, max(extent - window, 0) + stride, stride)]
            for extent in images.shape[-2:]
        ]
        return list(product(*sides))
