"""RISE: random masks, weighted by the score of the image under them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.methods.base import METHODS, MethodInfo, check_at_least_one
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.masking import MaskingMethod, to_explanation
from dave_vit.methods.pass_size import PassSize
from dave_vit.neighborhood.draws import sample_generator


@METHODS.register("rise")
class RISE(MaskingMethod):
    """The mean of smooth random masks, each weighted by the score of the image masked with it.

    Args:
        model: any module that maps inputs to logits.
        samples: masks.
        seed: the same seed gives the same masks, whatever the batch and the chunk.
        cells: number of cells of a mask along each side, before it is enlarged and shifted.
        shown: probability with which a cell shows the image.
        options: ``baseline``, ``score``, ``chunk`` and ``autocast``, as for every `MaskingMethod`.
    """

    info = MethodInfo(
        "Mean of random masks, weighted by the class's probability under them.",
        "Petsiuk et al., BMVC 2018",
        "1 + T forward",
        resolution="patch",
        unit="range",
    )
    _budget_option = ("samples", 0)

    def __init__(
        self, model: nn.Module, samples: int = 4000, seed: int = 0, cells: int = 7, shown: float = 0.5, **options: Any
    ) -> None:
        super().__init__(model, **options)
        if not 0 < shown < 1:
            raise OptionError(f"shown is {shown}; give a probability between 0 and 1, such as 0.5")
        self.samples, self.cells = check_at_least_one("samples", samples), check_at_least_one("cells", cells)
        self.seed, self.shown = seed, shown

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        target = self._resolve_target(images, target, pass_size)
        total, squares = torch.zeros(2, 1, dtype=images.dtype, device=images.device)
        masks_of = partial(self.masks, (images.shape[-2], images.shape[-1]))
        parts = self._score_under_masks(images, target, pass_size, masks_of, self.samples)
        for masks, scores in parts:
            shown = masks[:, 0].to(scores.dtype) / self.shown  # [n, H, W]
            total = total + torch.einsum("nbk,nhw->bkhw", scores, shown)
            squares = squares + torch.einsum("nbk,nhw->bkhw", scores.square(), shown.square())
        mean = total / self.samples  # eq. (6)
        spread = (squares / self.samples - mean.square()).clamp(min=0)
        error = (spread / max(self.samples - 1, 1)).sqrt()
        mean, error = (part.to(images.dtype) for part in (mean, error))  # [b, K, H, W]
        explanation = to_explanation(mean, images, target)
        return replace(explanation, samples=self.samples, mean=mean, standard_error=error)

    def masks(self, size: tuple[int, int], start: int, stop: int) -> Tensor:
        """Return masks ``start`` to ``stop`` of this seed, for images of one size: ``[n, 1, H, W]``."""
        return torch.stack([self._mask(size, index) for index in range(start, stop)])

    def _mask(self, size: tuple[int, int], index: int) -> Tensor:
        """Draw random cells, enlarge them beyond the image by one cell, and crop a random window."""
        drawn = torch.rand(1, 1, self.cells, self.cells, generator=sample_generator(self.seed, index, "noise"))
        cell = [-(-extent // self.cells) for extent in size]
        wide = F.interpolate((drawn < self.shown).float(), [(self.cells + 1) * side for side in cell], mode="bilinear")
        moves = sample_generator(self.seed, index, "spatial")
        top, left = (int(torch.randint(side, (1,), generator=moves)) for side in cell)
        return wide[0, :, top : top + size[0], left : left + size[1]]
