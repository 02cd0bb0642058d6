"""Attention alone as an explanation (last matrix, rollout, flow), or times its integrated gradient.

Attention alone does not depend on the class. Of a model with a class token its row is read; of one that averages its
tokens, the mean of their rows; where learned queries pool the tokens, the attention of these. One derivative shows it.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor

from dave_vit._internal.schema import Bounds, Count
from dave_vit.engine import PLAIN, Call, RuleSet, Target
from dave_vit.engine.observation import AttentionMatrix, Observation, observe
from dave_vit.engine.rules.attention import is_attention
from dave_vit.errors import InputError, OptionError, import_optional
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import TokenGraph, TokenMethod, gradients, token_graph, wide
from dave_vit.methods.words import residual, roll_words

T = TypeVar("T")
Heads = Literal["mean", "max", "min"]

_FUSE: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}
# Layers at either end that keep all edges where a network is thinned: enough for all tokens tried in DeiT-Tiny.
_OUTER = 3
_UNITS = 2**20  # capacities are counted in whole millionths, since flow is solved in integers


def _repeat_for_classes(scores: Tensor, graph: TokenGraph, target: Target) -> Tensor:
    """Return scores ``[b, N]`` as token grids ``[b, K, h, w]``, the same for all K targets."""
    return graph.layout.to_grid(scores).unsqueeze(1).expand(-1, target.count, -1, -1)


@METHODS.register("raw_attention")
class RawAttention(TokenMethod):
    """Attention from the class token to each patch, in the last layer.

    Args:
        model: a model with softmax attention among all tokens.
        layer: which block; -1 is the last.
        heads: "mean", "max" or "min".
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(paper="Vaswani et al., NeurIPS 2017", passes="1 forward", class_specific=False)

    layer: int = -1
    heads: Heads = "mean"

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        graph, fuse = token_graph(observed, images), _FUSE[self.heads]
        depth = len(graph.layers)
        if not -depth <= self.layer < depth:
            raise OptionError(f"layer {self.layer}; the model has layers 0 to {depth - 1}")
        if graph.pooling is not None and self.layer == -1:  # nothing comes between the pooling and the head
            return _repeat_for_classes(fuse(wide(graph.pooling), 1).mean(1), graph, target)
        rows = graph.readout() @ fuse(wide(graph.layers[self.layer]), 1)  # [b, 1, N]
        return _repeat_for_classes(rows[:, 0], graph, target)


@METHODS.register("rollout")
class Rollout(TokenMethod):
    """Product of all attention matrices, each mixed with the residual path.

    For a word of an answer it is read out where the language model predicts the word, and rolled out through the
    language model and the vision encoder.

    Args:
        model: a model with softmax attention among all tokens.
        heads: "mean", "max" or "min".
        discard: share of the smallest entries of each matrix that is set to zero, from 0 to 1.
        start_layer: the first block of the product.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(paper="Abnar and Zuidema, ACL 2020", passes="1 forward", class_specific=False)

    heads: Heads = "mean"
    discard: Annotated[float, Bounds(at_least=0, below=1)] = 0.0
    start_layer: int = 0

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        if observed.decoder is not None and self.start_layer == 0:
            return roll_words(observed, images, target, self._fuse)
        graph = token_graph(observed, images)
        layers = [self._fuse(layer) for layer in from_layer(graph.layers, self.start_layer)]
        return _repeat_for_classes(rollout(layers, graph.readout()), graph, target)

    def _fuse(self, layer: AttentionMatrix) -> Tensor:
        """Return the attention of a layer over all heads, without its smallest entries: ``[b, L, S]``."""
        matrix = _FUSE[self.heads](wide(layer), 1)
        flat = matrix.flatten(1)  # [b, L * S]
        smallest = flat.topk(int(self.discard * flat.shape[1]), largest=False).indices
        return flat.scatter(1, smallest, 0.0).view_as(matrix)


def from_layer(layers: Sequence[T], start: int) -> Sequence[T]:
    """Return the layers from ``start`` on."""
    if not 0 <= start < len(layers):
        raise OptionError(f"start_layer is {start}; the model has layers 0 to {len(layers) - 1}")
    return layers[start:]


def rollout(matrices: Sequence[Tensor], readout: Tensor) -> Tensor:
    """Return read-out A_L ... A_2 A_1 for ``matrices`` from first to last: one value per token, ``[b, N]``."""
    row = readout  # [b, 1, N]
    for matrix in reversed(matrices):
        row = row @ residual(matrix)
    return row[:, 0]


@METHODS.register("attention_flow")
class AttentionFlow(TokenMethod):
    """Maximum flow from each patch to the class token, attention being capacity.

    The maximum flow from each token to the read-out, with attention as the capacity of the edges between layers. Each
    token takes one maximum flow on the CPU: together 2 to 10 s per image for the 197 tokens of a 12-layer model. At
    most one unit can reach the read-out, and in deep models nearly every token reaches it with the whole capacity of
    its edges in the first block: such maps show the attention of the first block and are rather flat.

    Args:
        model: a model with softmax attention among all tokens.
        heads: "mean", "max" or "min".
        start_layer: the first block of the graph.
        max_tokens: models with more tokens are refused.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(
        paper="Abnar and Zuidema, ACL 2020", passes="1 forward, and one maximum flow a token", class_specific=False
    )

    heads: Heads = "mean"
    start_layer: int = 0
    max_tokens: int = 256

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        graph = token_graph(observed, images)
        if graph.layout.tokens > self.max_tokens:
            raise InputError(
                f"attention_flow on {graph.layout.tokens} tokens would take very long (see its cost); use rollout, "
                f"smaller images, or allow it with max_tokens={graph.layout.tokens}"
            )
        layers = from_layer(graph.layers, self.start_layer)
        stacked = torch.stack([residual(_FUSE[self.heads](wide(layer), 1)) for layer in layers], 1)  # [b, layers, N, N]
        flows = [flow(matrices, read[0]) for matrices, read in zip(stacked, graph.readout(), strict=True)]
        return _repeat_for_classes(torch.stack(flows), graph, target)


def flow(matrices: Tensor, readout: Tensor) -> Tensor:
    """Return the maximum flow from each token of the first layer to the read-out: ``[N]``.

    What leaves a token and what enters the read-out are upper bounds. Most tokens of deep models attain them even when
    the middle layers are thinned out to their residual edges, which is quicker to find; only the others need the whole
    graph.

    Args:
        matrices: ``[layers, N, N]``; entry (i, j) is the capacity from token j to token i of the next layer.
        readout: ``[N]``, capacity from each token of the last layer to the read-out.
    """
    maximum_flow = import_optional("scipy.sparse.csgraph", extra="eval").maximum_flow
    # In whole units, of which the algorithm counts its flow.
    capacity, read = ((part.cpu().double() * _UNITS).round().int() for part in (matrices, readout))
    end = (len(capacity) + 1) * len(read)
    whole = _graph(capacity, read)
    thin, (first, last) = whole, (_OUTER, len(capacity) - _OUTER)
    if first < last:
        residual_only = torch.diag_embed(capacity[first:last].diagonal(dim1=1, dim2=2))
        thin = _graph(torch.cat([capacity[:first], residual_only, capacity[last:]]), read)
    leaving, entering = capacity[0].sum(0), int(torch.minimum(capacity[-1].sum(1), read).sum())
    flows = []
    for token in range(len(read)):
        value = maximum_flow(thin, token, end, method="dinic").flow_value
        final = thin is whole or value == min(int(leaving[token]), entering)
        flows.append(value if final else maximum_flow(whole, token, end, method="dinic").flow_value)
    return torch.tensor(flows, dtype=matrices.dtype, device=matrices.device) / _UNITS


def _graph(capacity: Tensor, read: Tensor) -> Any:
    """Return the network as a sparse matrix: tokens layer by layer, then the read-out."""
    depth, tokens = capacity.shape[:2]
    end = (depth + 1) * tokens
    layer, to, start = capacity.nonzero().T
    last = read.nonzero()[:, 0]
    sources = torch.cat([layer * tokens + start, depth * tokens + last])
    targets = torch.cat([(layer + 1) * tokens + to, torch.full_like(last, end)])
    values = torch.cat([capacity[capacity != 0], read[read != 0]])
    entries = values.numpy(), (sources.numpy(), targets.numpy())
    return import_optional("scipy.sparse", extra="eval").csr_matrix(entries, shape=(end + 1, end + 1))


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
    layers: Annotated[int, Bounds(at_least=0)] = 1

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
        matrices = functools.reduce(torch.add, parts) / len(grid)  # [blocks, b, K, N, N]
        scores = [rollout(list(column), readout) for column in matrices.unbind(2)]  # K of [b, N]
        return torch.stack([graph.layout.to_grid(score) for score in scores], 1)

    def _integrand(self, images: Tensor, target: Target, points: Tensor, blocks: int, pass_size: PassSize) -> Tensor:
        """Return max(0, A * dA), averaged over heads and summed over points: ``[blocks, b, K, N, N]``."""
        rows = (points[:, 0].view(-1, 1, 1, 1, 1) * images).flatten(0, 1)  # [p * b, C, H, W]
        scales = points[:, 1:].repeat_interleave(len(images), 0)  # [p * b, layers]
        repeated = target.repeat(len(points))

        def compute(start: int, stop: int) -> Tensor:
            factors = dict(zip(range(blocks - self.layers, blocks), scales[start:stop].unbind(1), strict=True))
            some, rules = repeated.part(start, stop), scale_attention(factors)
            with observe(self.model, rows[start:stop], rules=rules, autocast=self.autocast, read=some.read) as observed:
                layers = token_graph(observed, rows[start:stop]).layers
                slopes = gradients(observed.logits, some, [layer.matrix for layer in layers])  # K lists
            matrices = torch.stack([wide(layer) for layer in layers])  # [blocks, rows, heads, N, N]
            return torch.stack([(matrices * torch.stack(column)).clamp(min=0).mean(2) for column in slopes], 2)

        values = torch.cat(pass_size.run_chunks(compute, len(rows)), 1)  # [blocks, p * b, K, N, N]
        return values.reshape(blocks, len(points), len(images), *values.shape[2:]).sum(1)


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
            perceived = torch.eye(last.shape[-1], dtype=layers[0].dtype, device=last.device)
            for layer in from_layer(layers, start):  # (I + A_L) ... (I + A_1)
                perceived = perceived + layer @ perceived
            scores.append((readout @ (last * perceived))[:, 0])
        return graph.layout.to_grid(torch.stack(scores, 1))

    def _integrate_last(self, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        """Average the gradient of the last attention over scaled copies of the images: ``[b, K, heads, N, N]``."""
        scales = torch.linspace(0, 1, self.steps, dtype=images.dtype, device=images.device).view(-1, 1, 1, 1, 1)

        def compute(rows: Tensor, target: Target) -> Tensor:
            with observe(self.model, rows, autocast=self.autocast, read=target.read) as observed:
                last = token_graph(observed, rows).layers[-1].matrix
                return torch.stack([slope for (slope,) in gradients(observed.logits, target, [last])], 1)

        return pass_size.run_rows(compute, scales * images, target).mean(0)


def weigh_heads(matrix: Tensor, slope: Tensor) -> Tensor:
    """Average attention ``[b, heads, N, N]`` over its heads, weighted by the mean of |A^T dA|: ``[b, N, N]``."""
    importance = (matrix.mT @ slope.to(matrix.dtype)).abs().mean((2, 3))  # [b, heads]
    share = importance / importance.sum(1, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
    return torch.einsum("bh,bhij->bij", share, matrix)
