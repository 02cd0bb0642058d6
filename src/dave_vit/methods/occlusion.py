"""Occlusion: how far the score falls when a window slides over the image and hides what is under it."""

from __future__ import annotations

from itertools import product
from typing import get_args

import torch
from torch import Tensor, nn

from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.methods.base import (
    METHODS,
    Explanation,
    Method,
    MethodInfo,
    check_at_least_one,
    check_choice,
    check_no_clips,
)
from dave_vit.methods.masking import Score, Squares, as_explanation, under_masks, whole
from dave_vit.methods.pass_size import PassSize


@METHODS.register("occlusion")
class Occlusion(Method):
    """The fall of the score under each window; pixels under several windows get the mean of their falls.

    Args:
        model: any module that maps inputs to logits.
        window: side of the window in pixels; two patches of the model, or a seventh of the image.
        stride: pixels from one window to the next; half of the window by default.
        baseline: what hidden pixels become; zero is the mean colour of normalised images.
        score: the class's "probability", as published, or its "logit"; other targets are their own number.
        chunk: windows in one forward pass.
        autocast: run the model under autocast.
    """

    info = MethodInfo(
        "Fall of the class's probability when a window is hidden.",
        "Zeiler and Fergus, ECCV 2014",
        "1 + windows forward",
        resolution="patch",
    )

    def __init__(
        self,
        model: nn.Module,
        window: int | None = None,
        stride: int | None = None,
        baseline: float = 0.0,
        *,
        score: Score = "probability",
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        self.window = None if window is None else check_at_least_one("window", window)
        self.stride = None if stride is None else check_at_least_one("stride", stride)
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise OptionError(
                f"stride is {stride} and window is {window}; no pixel may be skipped, give a stride up to it"
            )
        self.baseline, self.score = baseline, check_choice("score", score, get_args(Score))

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        check_no_clips(images, "occlusion", "hides places of one image")
        places = self._places(images)
        target, clean = whole(self, images, target, pass_size, self.score)  # [b, K]

        def masks(start: int, stop: int) -> Tensor:
            shown = images.new_ones(stop - start, 1, *images.shape[-2:])
            for mask, (rows, columns) in zip(shown, places[start:stop], strict=True):
                mask[:, rows, columns] = 0
            return shown

        falls, covered = clean.new_zeros(*clean.shape, *images.shape[-2:]), clean.new_zeros(images.shape[-2:])
        parts = under_masks(self, images, target, pass_size, masks, len(places), self.score, self.baseline)
        for shown, said in parts:
            hidden = 1 - shown[:, 0].to(said.dtype)  # [n, H, W]
            falls += torch.einsum("nbk,nhw->bkhw", clean - said, hidden)
            covered += hidden.sum(0)
        return as_explanation(falls / covered, images, target)

    def _places(self, images: Tensor) -> list[tuple[slice, slice]]:
        """The windows; those at the right and lower edge may be cut."""
        window = self.window or 2 * Squares.of(self.model, images, None).side
        stride = min(self.stride or max(1, window // 2), window)
        sides = [
            [slice(start, start + window) for start in range(0, max(extent - window, 0) + stride, stride)]
            for extent in images.shape[-2:]
        ]
        return list(product(*sides))
