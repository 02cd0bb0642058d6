"""Beyond Intuition: attention weighted by the importance of its heads, times the last one's integrated gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.observation import Observation, observe
from dave_vit.engine.targets import Target
from dave_vit.methods.attention import from_layer
from dave_vit.methods.base import METHODS, MethodInfo, check_at_least_one
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import TokenMethod, gradients, token_graph, wide


@METHODS.register("beyond_intuition")
class BeyondIntuition(TokenMethod):
    """Token attributions by attention perception and reasoning feedback, the head-wise form.

    Perception: R = R + A R over the blocks, where A is the mean of the heads' attention weighted by their importance
    E|A_h^T dA_h|. Feedback: the positive part of the last attention's gradient, averaged over scaled copies of the
    image. The map is the read-out's row of their product, entry by entry.

    Args:
        model: a model with softmax attention among all tokens.
        steps: scaled copies of the image, from zero to the image itself.
        start_layer: the first block that counts; a quarter of all by default, as in the authors' code for 12 blocks.
        options: ``resolution``, ``chunk`` (scaled copies in one forward pass) and ``autocast``.
    """

    info = MethodInfo(
        "Attention weighted by the importance of its heads, times the last attention's integrated gradient.",
        "Chen et al., TMLR 2023",
        "1 + n forward, 1 + n backward",
        resolution="patch",
    )
    _budget_option = ("steps", 1)

    def __init__(self, model: nn.Module, steps: int = 20, start_layer: int | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        self.steps, self.start_layer = check_at_least_one("steps", steps), start_layer

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        graph = token_graph(observed, images)
        slopes, readout = gradients(graph.logits, target, [layer.matrix for layer in graph.layers]), graph.readout()
        feedback = self._integrate_last(images, target, pass_size).clamp(min=0).mean(2)  # [b, K, N, N]
        start = len(graph.layers) // 4 if self.start_layer is None else self.start_layer
        matrices = [wide(layer) for layer in graph.layers]
        scores = []
        for column, last in zip(slopes, feedback.unbind(1), strict=True):
            layers = [weigh_heads(*pair) for pair in zip(matrices, column, strict=True)]
            scores.append((readout @ (last * perception(from_layer(layers, start))))[:, 0])
        return graph.layout.to_grid(torch.stack(scores, 1))

    def _integrate_last(self, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        """Average the gradient of the last attention over scaled copies of the images: ``[b, K, heads, N, N]``."""
        scales = torch.linspace(0, 1, self.steps, dtype=images.dtype, device=images.device)
        rows, repeated = (scales.view(-1, 1, 1, 1, 1) * images).flatten(0, 1), target.repeat(self.steps)

        def compute(start: int, stop: int) -> Tensor:
            part = repeated.part(start, stop)
            with observe(self.model, rows[start:stop], autocast=self.autocast, read=part.read) as observed:
                last = token_graph(observed, rows[start:stop]).layers[-1].matrix
                return torch.stack([slope for (slope,) in gradients(observed.logits, part, [last])], 1)

        slopes = torch.cat(pass_size.run_chunks(compute, len(rows)))  # [steps * b, K, heads, N, N]
        return slopes.reshape(self.steps, len(images), *slopes.shape[1:]).mean(0)


def weigh_heads(matrix: Tensor, slope: Tensor) -> Tensor:
    """Average attention ``[b, heads, N, N]`` over its heads, weighted by the mean of |A^T dA|: ``[b, N, N]``."""
    importance = (matrix.mT @ slope.to(matrix.dtype)).abs().mean((2, 3))  # [b, heads]
    share = importance / importance.sum(1, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
    return torch.einsum("bh,bhij->bij", share, matrix)


def perception(layers: Sequence[Tensor]) -> Tensor:
    """Return (I + A_L) ... (I + A_1): ``[b, N, N]``."""
    total = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype, device=layers[0].device).expand_as(layers[0])
    for layer in layers:
        total = total + layer @ total
    return total
