"""FullGrad: input times gradient plus bias times gradient, layer by layer."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.errors import OptionError
from dave_vit.intercept import RuleSet
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.located import Contribution, Located, contributions, per_channel, spread_evenly
from dave_vit.precision import precise_dtype
from dave_vit.rules.sets.full_gradient import FULL_GRADIENT, FULL_GRADIENT_OF_CONVOLUTIONS
from dave_vit.targets import TargetLike, resolve_target

Biases = Literal["all", "conv"]

_RULES: dict[str, RuleSet] = {"all": FULL_GRADIENT, "conv": FULL_GRADIENT_OF_CONVOLUTIONS}


@METHODS.register("fullgrad")
class FullGrad(Located):
    """Input times gradient, and bias times gradient of every layer, brought to the size of the image and added up.

    As published, each channel of each layer is taken by its absolute value and rescaled to [0, 1] before it is brought
    to the image's size and added, so the map is never negative. What has no place in the image (class tokens, pooled
    features, the head) stays out. With ``rescale=False`` everything keeps its sign and size and what has no place is
    spread evenly: the attribution of a piecewise linear model (ReLU, max-pool, batch norm) then sums to its logit.

    Args:
        model: any module that maps inputs to logits.
        biases: "all" takes every additive constant (convolutions, linear layers, norms, position embeddings); "conv"
            takes convolutions and batch norms only, as the grad-cam package does. In a ViT that is one layer.
        rescale: as published; False gives signed sums.
        chunk: has no effect here; images go through one by one, so that every constant is known to be theirs.
        autocast: run the model under autocast.
    """

    info = MethodInfo(
        "Input times gradient plus bias times gradient of every layer.",
        "Srinivas and Fleuret, NeurIPS 2019",
        "1 forward, 1 backward",
    )

    def __init__(
        self,
        model: nn.Module,
        *,
        biases: Biases = "all",
        rescale: bool = True,
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        if biases not in _RULES:
            raise OptionError(f"biases {biases!r}; expected one of {', '.join(get_args(Biases))}")
        self.biases, self.rescale = biases, rescale

    def _single(self, image: Tensor, target: TargetLike) -> tuple[Tensor, Tensor]:
        rules = _RULES[self.biases]
        found, parts = contributions(self.model, image, target, rules=rules, autocast=self.autocast)
        direct = found.weight * image
        size = (image.shape[-2], image.shape[-1])
        total = torch.zeros(size, dtype=precise_dtype(image.device), device=image.device)
        for part in parts:
            total += self._rescaled(part, size) if self.rescale else self._signed(part, size)
        direct = rescaled(direct[0])[None] if self.rescale else direct
        maps = direct + per_channel(total, image.shape[1]).to(image.dtype)
        return maps, resolve_target(found.logits, target)

    @staticmethod
    def _rescaled(part: Contribution, size: tuple[int, int]) -> Tensor | float:
        if part.grid is None:
            return 0.0
        layer = rescaled(part.grid).sum(0)  # the sum before the upsampling, which is linear
        return F.interpolate(layer[None, None], size, mode="bilinear", align_corners=False)[0, 0]

    @staticmethod
    def _signed(part: Contribution, size: tuple[int, int]) -> Tensor:
        rest = part.elsewhere / (size[0] * size[1])
        return rest if part.grid is None else rest + spread_evenly(part.grid.sum(0), size)


def rescaled(layer: Tensor) -> Tensor:
    """Absolute values, each channel of ``[D, h, w]`` from 0 to 1."""
    size = layer.abs()
    size = size - size.amin((-2, -1), keepdim=True)
    top = size.amax((-2, -1), keepdim=True)
    return size / torch.where(top > 0, top, 1)
