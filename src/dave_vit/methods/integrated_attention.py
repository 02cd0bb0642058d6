"""Gradients of attention, integrated over scaled copies of the image: IIA and Beyond Intuition."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from dave_vit._internal.schema import Count, Limits
from dave_vit.engine.calls import Call, RuleSet
from dave_vit.engine.observation import Observation, observe
from dave_vit.engine.rule_sets import PLAIN
from dave_vit.engine.rules.attention import is_attention
from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.methods.attention import from_layer, rollout
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import TokenMethod, gradients, token_graph, wide


@METHODS.register("iia")
class IIA(TokenMethod):
    """Gradient times attention, integrated over the input and the last block's attention, then rolled out.

    Iterated integrated attributions of a vision transformer. The integrals run over the input and over the attention of
    the last blocks, each from zero. At every point, with the image at i/n of itself and the attention A of each
    interpolated block at j/n of itself, the positive part of attention times its gradient is taken in all blocks
    (gradient rollout). Its average over points and heads then goes through rollout: as in the authors' code, rollout
    comes after the integrals. Unlike there, interpolated attention still depends on the blocks before it, as the
    definition has it.

    Args:
        model: a model with softmax attention among all tokens.
        steps: points of each integral, n, at 1/n, 2/n ... 1.
        layers: interpolated blocks, counted from the last; 1 is IIA2 of the paper, 2 is IIA3 and costs n times more.
        options: ``resolution``, ``chunk`` (points in one forward pass) and ``autocast``.
    """

    info = MethodInfo(paper="Barkan et al., ICCV 2023", passes="1 + n^2 forward, 1 + n^2 backward")

    steps: Count = 10
    layers: Annotated[int, Limits(at_least=0)] = 1

    @classmethod
    def options_for_budget(cls, budget: int, **options: Any) -> dict[str, Any]:
        """Return the number of steps: the points of all integrals, and the image itself, take one pass each."""
        axes = 1 + int(options.get("layers", 1))
        return {"steps": next(steps for steps in itertools.count(1) if 1 + (steps + 1) ** axes > budget)}

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        graph = token_graph(observed, images)
        blocks, readout = len(graph.layers), graph.readout()
        if self.layers > blocks:
            raise OptionError(f"layers is {self.layers}; the model has {blocks} blocks with attention")
        axis = [step / self.steps for step in range(1, self.steps + 1)]
        places = torch.tensor(list(itertools.product(axis, repeat=1 + self.layers)), dtype=torch.float64)
        grid = places.to(images.dtype).to(images.device)  # where the integrals are evaluated, [points, 1 + layers]
        points = grid.split(pass_size.samples_per_pass(images))
        parts = (self._integrand(images, target, part, blocks, pass_size) for part in points)
        matrices: Tensor = functools.reduce(torch.add, parts) / len(grid)  # [blocks, b, K, N, N]
        scores = [rollout(list(column), readout) for column in matrices.unbind(2)]  # K of [b, N]
        return torch.stack([graph.layout.to_grid(score) for score in scores], 1)

    def _integrand(self, images: Tensor, target: Target, points: Tensor, blocks: int, pass_size: PassSize) -> Tensor:
        """Return max(0, A * dA), averaged over heads and summed over points: ``[blocks, b, K, N, N]``."""
        rows = (points[:, 0].view(-1, 1, 1, 1, 1) * images).flatten(0, 1)  # [p * b, C, H, W]
        scales = points[:, 1:].repeat_interleave(len(images), 0)  # [p * b, layers]
        repeated = target.repeat(len(points))

        def compute(start: int, stop: int) -> Tensor:
            factors = dict(zip(range(blocks - self.layers, blocks), scales[start:stop].unbind(1), strict=True))
            return self._contributions(rows[start:stop], repeated.part(start, stop), scale_attention(factors))

        values = torch.cat(pass_size.run_chunks(compute, len(rows)), 1)  # [blocks, p * b, K, N, N]
        return values.reshape(blocks, len(points), len(images), *values.shape[2:]).sum(1)

    def _contributions(self, rows: Tensor, target: Target, rules: RuleSet) -> Tensor:
        """Return max(0, A * dA), averaged over heads: ``[blocks, rows, K, N, N]``."""
        with observe(self.model, rows, rules=rules, autocast=self.autocast, read=target.read) as observed:
            layers = token_graph(observed, rows).layers
            slopes = gradients(observed.logits, target, [layer.matrix for layer in layers])  # K lists
        matrices = torch.stack([wide(layer) for layer in layers])  # [blocks, rows, heads, N, N]
        return torch.stack([(matrices * torch.stack(column)).clamp(min=0).mean(2) for column in slopes], 2)


def scale_attention(scales: dict[int, Tensor]) -> RuleSet:
    """Return rules for one forward pass that scale the attention of some blocks and keep ordinary derivatives.

    Args:
        scales: index of a block to its factor for each row ``[rows]``.
    """
    block = itertools.count()

    def softmax(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        matrix: Tensor = call.func(input, *args, **kwargs)
        scale = scales.get(next(block)) if is_attention(input, *args, **kwargs) else None
        if scale is None:
            return matrix
        factor = scale.repeat_interleave(len(matrix) // len(scale)).to(matrix.dtype)  # [rows] or [rows * heads]
        return matrix * factor.view(-1, *[1] * (matrix.ndim - 1))

    return PLAIN.extend("interpolated attention", dict.fromkeys(["softmax", "_softmax"], softmax))


@METHODS.register("beyond_intuition")
class BeyondIntuition(TokenMethod):
    """Attention weighted by the importance of its heads, times the last attention's integrated gradient.

    Token attributions by attention perception and reasoning feedback, the head-wise form. Perception: R = R + A R over
    the blocks, where A is the mean of the heads' attention weighted by their importance E|A_h^T dA_h|. Feedback: the
    positive part of the last attention's gradient, averaged over scaled copies of the image. The map is the read-out's
    row of their product, entry by entry.

    Args:
        model: a model with softmax attention among all tokens.
        steps: scaled copies of the image, from zero to the image itself.
        start_layer: the first block that counts; a quarter of all by default, as in the authors' code for 12 blocks.
        options: ``resolution``, ``chunk`` (scaled copies in one forward pass) and ``autocast``.
    """

    info = MethodInfo(paper="Chen et al., TMLR 2023", passes="1 + n forward, 1 + n backward")
    _budget_option = ("steps", 1)
    steps: Count = 20
    start_layer: int | None = None

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
