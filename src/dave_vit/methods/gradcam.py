"""Grad-CAM: channels of the last tokens or features, weighted by their mean gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.chunks import Passes
from dave_vit.methods.tokens import TokenMethod, gradients
from dave_vit.run.layout import TokenLayout, find_layout
from dave_vit.run.observe import Observation
from dave_vit.targets import Target


@METHODS.register("gradcam")
class GradCAM(TokenMethod):
    """The channels of a feature map, weighted by the mean of their gradient over all places, and added up.

    In a Vision Transformer these are the normed tokens that enter the last attention, without class and register
    tokens. In a model without attention among all tokens (a CNN, a mixer) they are what is averaged for the head.

    Args:
        model: any module that maps inputs to logits.
        positive: what speaks for the class only, as published; otherwise the signed sum.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(
        "Channels of the last block's tokens, weighted by their mean gradient.",
        "Selvaraju et al., ICCV 2017",
        "1 forward, 1 backward",
        resolution="patch",
    )

    def __init__(self, model: nn.Module, *, positive: bool = True, **options: Any) -> None:
        super().__init__(model, **options)
        self.positive = positive

    def _grids(self, observed: Observation, images: Tensor, target: Target, passes: Passes) -> Tensor:
        source, as_picture = _features(observed, images)
        features = as_picture(source.detach())  # [b, D, h, w]
        maps = []
        for (slope,) in gradients(observed.logits, target, [source]):
            weight = as_picture(slope).mean((2, 3), keepdim=True)  # eq. (1)
            maps.append((weight * features).sum(1))  # eq. (2), without its ReLU
        grids = torch.stack(maps, 1)  # [b, K, h, w]
        return grids.clamp(min=0) if self.positive else grids


def _features(observed: Observation, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A tensor of the graph, and how it or its gradient becomes a picture of features ``[b, D, h, w]``."""
    for attention in reversed(observed.attention):
        tokens, shape = attention.tokens, attention.matrix.shape
        if tokens is not None and tokens.shape[:2] == (len(images), shape[-1]) and shape[-2] == shape[-1]:
            return tokens, partial(_transposed, find_layout(observed, shape[-1], images))
    if observed.pooled is None:
        raise UnsupportedOperator(
            "gradcam found neither attention among all tokens nor features that are averaged for the head; use dave or "
            "input_x_gradient, which work on any model"
        )
    if observed.pooled.ndim == 4:
        return observed.pooled, lambda values: values
    return observed.pooled, find_layout(observed, observed.pooled.shape[-1], images).to_grid


def _transposed(layout: TokenLayout, tokens: Tensor) -> Tensor:
    return layout.to_grid(tokens.mT)  # [b, N, D] -> [b, D, h, w]
