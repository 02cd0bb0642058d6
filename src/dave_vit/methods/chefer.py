"""Attention weighted by what it contributes to the class: the two methods of Chefer, Gur and Wolf."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.errors import OptionError
from dave_vit.methods.attention import from_layer
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.tokens import TokenGraph, TokenMethod, gradients, token_graph
from dave_vit.precision import precise_dtype
from dave_vit.rules.sets.relevance import alpha_beta
from dave_vit.run.observe import Observation, observation


class _Weighted(TokenMethod):
    """A method that gathers tokens through gradients times a value of each attention matrix.

    Args:
        model: a model with softmax attention among all tokens.
        start_layer: the first block that counts.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    def __init__(self, model: nn.Module, *, start_layer: int = 0, **options: Any) -> None:
        super().__init__(model, **options)
        self.start_layer = start_layer

    def _seen(self, seen: Observation, images: Tensor, target: Tensor) -> Tensor:
        graph = token_graph(seen, images)
        found = gradients(seen, target, [attention.matrix for attention in graph.all])
        values = self._values(graph, images, target)  # K lists of [b, heads, L, S]
        maps = [self._gathered(graph, *column) for column in zip(found, values, strict=True)]
        return graph.layout.to_grid(torch.stack(maps, 1))

    def _gathered(self, graph: TokenGraph, grads: list[Tensor], values: list[Tensor]) -> Tensor:
        """One value a token ``[b, N]``."""
        parts = zip(grads, values, strict=True)
        means = [(grad.to(value.dtype) * value).clamp(min=0).mean(1) for grad, value in parts]  # E_h (dA * A)^+
        layers = from_layer(means[: len(graph.layers)], self.start_layer)
        pooled = means[len(graph.layers) :]
        start = pooled[0].mean(1, keepdim=True) if pooled else graph.readout().to(layers[0].dtype)  # [b, 1, N]
        gained = torch.zeros_like(start)
        for layer in reversed(layers):
            gained = gained + (start + gained) @ layer  # the read-out's row of (I + A_L) ... (I + A_1), less I
        return (start + gained if pooled else gained)[:, 0]  # a token's relevance to itself is no finding

    @abstractmethod
    def _values(self, graph: TokenGraph, images: Tensor, target: Tensor) -> list[list[Tensor]]:
        """For each of the K classes, what the gradient of each matrix is multiplied by."""


@METHODS.register("chefer_generic")
class CheferGeneric(_Weighted):
    """Attention times its gradient, gathered over all layers: R = R + E_h (dA * A)^+ R.

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

    def _values(self, graph: TokenGraph, images: Tensor, target: Tensor) -> list[list[Tensor]]:
        return [[attention.matrix.detach() for attention in graph.all]] * target.shape[1]


@METHODS.register("chefer_lrp")
class CheferLRP(_Weighted):
    """Transformer attribution: relevance of the attention matrices times their gradient, gathered over all layers.

    Relevance is propagated back through the whole model by the alpha-beta rule, image by image and in float64 whatever
    the model's type is: in float32 it is ill-conditioned, and maps can differ visibly from one machine to the next.
    Autocast applies to the gradient only.

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
        super().__init__(model, start_layer=start_layer, **options)
        if not 1 <= alpha < float("inf"):
            raise OptionError(f"alpha is {alpha}; give a number of at least 1 (beta is alpha - 1)")
        self.alpha = alpha

    def _values(self, graph: TokenGraph, images: Tensor, target: Tensor) -> list[list[Tensor]]:
        # One by one: sums share their relevance out by totals over the whole image.
        single = [self._relevance(*pair) for pair in zip(images.split(1), target.split(1), strict=True)]
        columns = zip(*single, strict=True)  # K tuples of b lists
        return [[torch.cat(layer) for layer in zip(*column, strict=True)] for column in columns]

    def _relevance(self, image: Tensor, target: Tensor) -> list[list[Tensor]]:
        exact = image.to(precise_dtype(image.device))
        with observation(self.model, exact, rules=alpha_beta(self.alpha)) as seen:
            return gradients(seen, target, [attention.matrix for attention in seen.attention])
