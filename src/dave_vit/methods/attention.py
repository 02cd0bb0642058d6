"""Attention itself as an explanation: the last matrix, the product of all, or the flow through all of them.

None of these depends on the class. If the model has a class token, its row is read; if it averages its tokens, the mean
of their rows; if learned queries pool the tokens, the attention of these. A derivative of the logits through the head
and the last block, the only backward step, shows which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from dave_vit._internal.schema import Limits
from dave_vit.engine.observation import AttentionMatrix, Observation
from dave_vit.engine.targets import Target
from dave_vit.errors import InputError, OptionError, require_extra
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import TokenGraph, TokenMethod, token_graph, wide
from dave_vit.methods.words import residual, roll_words

Heads = Literal["mean", "max", "min"]

_FUSE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda matrix: matrix.mean(1),
    "max": lambda matrix: matrix.amax(1),
    "min": lambda matrix: matrix.amin(1),
}
_OUTER = (3, 3)  # layers that keep all edges where a network is thinned: enough for all tokens tried in DeiT-Tiny
_UNITS = 2**20  # capacities are counted in whole millionths, since flow is solved in integers


def _fuse_heads(graph: TokenGraph, heads: Heads) -> list[Tensor]:
    """Return one matrix ``[b, N, N]`` per layer."""
    return [_FUSE[heads](wide(layer)) for layer in graph.layers]


def _repeat_for_classes(scores: Tensor, graph: TokenGraph, target: Target) -> Tensor:
    """Return scores ``[b, N]`` as token grids ``[b, K, h, w]``, the same for all K targets."""
    grid = graph.layout.to_grid(scores)  # [b, h, w]
    return grid.unsqueeze(1).expand(-1, target.count, -1, -1)


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
        graph = token_graph(observed, images)
        return _repeat_for_classes(self._scores(graph), graph, target)

    def _scores(self, graph: TokenGraph) -> Tensor:
        layers = _fuse_heads(graph, self.heads)
        if not -len(layers) <= self.layer < len(layers):
            raise OptionError(f"layer {self.layer}; the model has layers 0 to {len(layers) - 1}")
        if graph.pooling is not None and self.layer == -1:  # nothing comes between the pooling and the head
            return _FUSE[self.heads](wide(graph.pooling)).mean(1)
        return (graph.readout() @ layers[self.layer])[:, 0]


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
    discard: Annotated[float, Limits(at_least=0, below=1)] = 0.0
    start_layer: int = 0

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        if observed.decoder is not None and self.start_layer == 0:
            return roll_words(observed, images, target, self._fuse)
        graph = token_graph(observed, images)
        matrices = from_layer(_fuse_heads(graph, self.heads), self.start_layer)
        kept = [_without_smallest(matrix, self.discard) for matrix in matrices]
        return _repeat_for_classes(rollout(kept, graph.readout()), graph, target)

    def _fuse(self, layer: AttentionMatrix) -> Tensor:
        """Return the attention of a layer over all heads, without its smallest entries: ``[b, L, S]``."""
        return _without_smallest(_FUSE[self.heads](wide(layer)), self.discard)


def from_layer(layers: list[Tensor], start: int) -> list[Tensor]:
    """Return the layers from ``start`` on."""
    if not 0 <= start < len(layers):
        raise OptionError(f"start_layer is {start}; the model has layers 0 to {len(layers) - 1}")
    return layers[start:]


def _without_smallest(matrix: Tensor, share: float) -> Tensor:
    flat = matrix.flatten(1)  # [b, N * N]
    smallest = flat.topk(int(share * flat.shape[1]), largest=False).indices
    return flat.scatter(1, smallest, 0.0).view_as(matrix)


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
        layers = [residual(matrix) for matrix in from_layer(_fuse_heads(graph, self.heads), self.start_layer)]
        stacked = torch.stack(layers, 1)  # [b, layers, N, N]
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
    with require_extra("scipy", "eval"):
        from scipy.sparse.csgraph import maximum_flow  # type: ignore[import-untyped]
    # In whole units, of which the algorithm counts its flow.
    capacity, read = ((part.cpu().double() * _UNITS).round().int() for part in (matrices, readout))
    end = (len(capacity) + 1) * len(read)
    whole = _graph(capacity, read)
    thin = _graph(_remove_middle_edges(capacity), read) if len(capacity) > sum(_OUTER) else whole
    leaving, entering = capacity[0].sum(0), int(torch.minimum(capacity[-1].sum(1), read).sum())
    flows = []
    for token in range(len(read)):
        value = maximum_flow(thin, token, end, method="dinic").flow_value
        final = thin is whole or value == min(int(leaving[token]), entering)
        flows.append(value if final else maximum_flow(whole, token, end, method="dinic").flow_value)
    return torch.tensor(flows, dtype=matrices.dtype, device=matrices.device) / _UNITS


def _graph(capacity: Tensor, read: Tensor) -> Any:
    """Return the network as a sparse matrix: tokens layer by layer, then the read-out."""
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

    depth, tokens = capacity.shape[:2]
    end = (depth + 1) * tokens
    layer, to, start = capacity.nonzero().T
    last = read.nonzero()[:, 0]
    sources = torch.cat([layer * tokens + start, depth * tokens + last])
    targets = torch.cat([(layer + 1) * tokens + to, torch.full_like(last, end)])
    values = torch.cat([capacity[capacity != 0], read[read != 0]])
    return csr_matrix((values.numpy(), (sources.numpy(), targets.numpy())), shape=(end + 1, end + 1))


def _remove_middle_edges(capacity: Tensor) -> Tensor:
    """Remove the edges between different tokens in the layers between the outer ones."""
    first, last = _OUTER
    middle = torch.diag_embed(capacity[first : len(capacity) - last].diagonal(dim1=1, dim2=2))
    return torch.cat([capacity[:first], middle, capacity[max(first, len(capacity) - last) :]])
