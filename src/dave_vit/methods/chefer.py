"""Attention weighted by what it contributes to the class: the two methods of Chefer, Gur and Wolf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.observation import Observation, observe
from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.methods.attention import from_layer
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.chefer_rules import alpha_beta
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import TokenGraph, TokenMethod, gradients, token_graph


def _relevance_grids(
    graph: TokenGraph, slopes: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]], start_layer: int
) -> Tensor:
    """Return token grids ``[b, K, h, w]`` from K lists, one per class: a gradient and a value of each matrix."""
    columns = zip(slopes, values, strict=True)
    return graph.layout.to_grid(torch.stack([_relevance(graph, *column, start_layer) for column in columns], 1))


def _relevance(graph: TokenGraph, slopes: Sequence[Tensor], values: Sequence[Tensor], start_layer: int) -> Tensor:
    """Return one value per token, ``[b, N]``."""
    parts = zip(slopes, values, strict=True)
    means = [(slope.to(value.dtype) * value).clamp(min=0).mean(1) for slope, value in parts]  # E_h (dA * A)^+
    layers = from_layer(means[: len(graph.layers)], start_layer)
    pooled = means[len(graph.layers) :]
    start = pooled[0].mean(1, keepdim=True) if pooled else graph.readout().to(layers[0].dtype)  # [b, 1, N]
    gained = torch.zeros_like(start)
    for layer in reversed(layers):
        gained = gained + (start + gained) @ layer  # the read-out's row of (I + A_L) ... (I + A_1), less I
    return (start + gained if pooled else gained)[:, 0]  # what a token is to itself says nothing


@METHODS.register("chefer_generic")
class CheferGeneric(TokenMethod):
    """Attention times its gradient, accumulated over all layers: R = R + E_h (dA * A)^+ R.

    Args:
        model: a model with softmax attention among all tokens.
        start_layer: the first block that counts.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(
        "Attention times its gradient, gathered over all layers.",
        "Chefer et al., ICCV 2021",
        "1 forward, 1 backward",
        resolution="patch",
    )

    def __init__(self, model: nn.Module, *, start_layer: int = 0, **options: Any) -> None:
        super().__init__(model, **options)
        self.start_layer = start_layer

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        graph = token_graph(observed, images)
        matrices = [attention.matrix for attention in graph.all]
        slopes = gradients(graph.logits, target, matrices)
        return _relevance_grids(
            graph, slopes, [[matrix.detach() for matrix in matrices]] * len(slopes), self.start_layer
        )


@METHODS.register("chefer_lrp")
class CheferLRP(TokenMethod):
    """Transformer attribution: relevance of the attention matrices times their gradient, accumulated over all layers.

    Relevance is propagated back through the whole model by the alpha-beta rule, image by image and in float64 whatever
    the model's type is: in float32 it is ill-conditioned, and maps can differ visibly from one machine to the next.
    Autocast applies to the gradient only. Of a class against others the relevance is that of the class by itself: sums
    share relevance out by its total, which is zero for a difference of logits.

    Args:
        model: a model with softmax attention among all tokens.
        start_layer: the first block that counts.
        alpha: weight of positive contributions in linear layers; negative ones weigh ``alpha - 1``.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(
        "Relevance of attention matrices times their gradient, gathered over all layers.",
        "Chefer et al., CVPR 2021",
        "2 forward, 2 backward",
        resolution="patch",
    )

    def __init__(self, model: nn.Module, *, start_layer: int = 0, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(model, **options)
        if not 1 <= alpha < float("inf"):
            raise OptionError(f"alpha is {alpha}; give a number of at least 1 (beta is alpha - 1)")
        self.start_layer, self.alpha = start_layer, alpha

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        graph = token_graph(observed, images)
        slopes = gradients(graph.logits, target, [attention.matrix for attention in graph.all])
        # One by one: sums share their relevance out by totals over the whole image.
        single = [
            self._relevances(images[i : i + 1], target.part(i, i + 1).without_contrast()) for i in range(len(images))
        ]
        values = [[torch.cat(layer) for layer in zip(*column, strict=True)] for column in zip(*single, strict=True)]
        return _relevance_grids(graph, slopes, values, self.start_layer)

    def _relevances(self, image: Tensor, target: Target) -> Sequence[Sequence[Tensor]]:
        """Return K lists, one per class: the relevance of each attention matrix of one image."""
        exact = image.to(precise_dtype(image.device))
        with observe(self.model, exact, rules=alpha_beta(self.alpha), read=target.read) as observed:
            return gradients(observed.logits, target, [attention.matrix for attention in observed.attention])
