"""Attention: the matrix is frozen, only the values carry gradient (appendix A, self-attention)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.calls import Call, carry
from dave_vit.engine.rules.linear import freeze
from dave_vit.engine.states import is_carrier, map_tensors
from dave_vit.errors import training_error

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def attention_matrix(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute softmax(Q K^T * scale + mask) as ``scaled_dot_product_attention`` does: ``[..., Hq, L, S]``.

    Queries are ``[..., Hq, L, E]``, keys ``[..., Hk, S, E]``.
    In at least float32 until the end: half types would round scores before they are exponentiated. The row of a query
    whose keys are all masked is zero.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    wide = working_dtype(query.dtype)
    scores = (query.to(wide) * scale) @ repeat_heads(key, query).to(wide).transpose(-2, -1)
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if attn_mask is None:
        return scores.softmax(-1).to(query.dtype)
    scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    all_masked = scores.isneginf().all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(all_masked, 0.0).to(query.dtype)


def repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of keys or values for the query heads that share them (grouped-query attention)."""
    if tensor.ndim < 3 or query.ndim < 3 or tensor.shape[-3] >= query.shape[-3]:
        return tensor
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)


@dataclass(frozen=True, eq=False)
class AttentionArguments:
    """The arguments of one call of ``scaled_dot_product_attention``.

    Attributes:
        query: ``[..., Hq, L, E]``.
        key: ``[..., Hk, S, E]``.
        value: ``[..., Hk, S, Ev]``.
        mask: added to the scores, or True where a query may attend.
        options: the others, such as ``is_causal`` and ``scale``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]

    @classmethod
    def bind(
        cls,
        call: Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001
        **options: Any,
    ) -> AttentionArguments:
        """Bind the arguments of a call; refuse active dropout."""
        if dropout_p > 0.0:
            raise training_error("attention dropout" + call.mode.location())
        if query.dtype == torch.float64 and attn_mask is not None and attn_mask.dtype == torch.float32:
            attn_mask = attn_mask.double()  # else torch 2.15 returns wrong values on a CPU
        return cls(query, key, value, attn_mask, {"is_causal": is_causal, **options})

    def freeze(self) -> AttentionArguments:
        """Return them without gradient, in the type in which autocast runs attention."""
        query, key, value, mask = map_tensors(_cast_frozen, [self.query, self.key, self.value, self.mask])
        return AttentionArguments(query, key, value, mask, self.options)

    def compute(self, call: Call) -> Tensor:
        """Call the function."""
        return call.func(self.query, self.key, self.value, self.mask, **self.options)  # type: ignore[no-any-return]

    @property
    def score_options(self) -> dict[str, Any]:
        """The options that change the matrix."""
        return {"is_causal": self.options["is_causal"], "scale": self.options.get("scale")}


def _cast_frozen(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.detach().to(torch.get_autocast_dtype(device))
    return tensor.detach()


def scaled_dot_product_attention(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Fused attention: A V with the matrix A frozen, so that the derivative is A^T."""
    arguments = AttentionArguments.bind(call, *args, **kwargs)
    if not is_carrier(arguments.value):
        return freeze(call, *args, **kwargs)  # type: ignore[no-any-return]
    frozen = arguments.freeze()
    pullback = partial(values_gradient, shape=arguments.value.shape, options=frozen.score_options)
    saved = (frozen.query, frozen.key, frozen.mask)
    return carry(lambda: frozen.compute(call), pullback, arguments.value, saved=saved)


def values_gradient(
    grad: Tensor, query: Tensor, key: Tensor, mask: Tensor | None, *, shape: torch.Size, options: dict[str, Any]
) -> Tensor:
    """Compute A^T grad in the shape of the values; heads that share one value head add up."""
    matrix = attention_matrix(query, key, mask, **options)
    pulled = matrix.transpose(-2, -1) @ grad.to(matrix.dtype)  # [..., Hq, S, Ev]
    if len(shape) > 2 and 1 < shape[-3] < pulled.shape[-3]:
        pulled = pulled.unflatten(-3, (shape[-3], -1)).sum(-3)
    return pulled.sum_to_size(shape)


def attention_in_parts(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Fused attention as products and a softmax, each of which meets its own rule."""
    parts = AttentionArguments.bind(call, *args, **kwargs)
    with call.mode:
        matrix = attention_matrix(parts.query, parts.key, parts.mask, **parts.score_options)
        return matrix @ repeat_heads(parts.value, parts.query)


def multi_head_attention(call: Call, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` in its parts, so that each part meets its own rule."""
    packed = _bind_arguments(call, *args, **kwargs)
    with call.mode:
        q, k, v = (_split_heads(F.linear(*part), packed.num_heads) for part in _projections(packed))
        mask = _merge_masks(packed, q, k)
        k = _append_rows(k, packed.bias_k, zero=packed.add_zero_attn)
        v = _append_rows(v, packed.bias_v, zero=packed.add_zero_attn)
        mask = None if mask is None else F.pad(mask, (0, k.shape[2] - mask.shape[-1]))
        mixed = F.scaled_dot_product_attention(q, k, v, mask)  # [N, heads, L, E / heads]
        mixed = mixed.permute(2, 0, 1, 3).flatten(2)  # [L, N, E]
        out = F.linear(mixed.reshape(packed.query.shape), packed.out_proj_weight, packed.out_proj_bias)
    if not packed.need_weights:
        return out, None
    matrix = attention_matrix(q.detach(), k.detach(), mask)  # [N, heads, L, S]
    matrix = matrix.mean(1) if packed.average_attn_weights else matrix
    return out, matrix if packed.query.ndim == 3 else matrix[0]


def _bind_arguments(call: Call, *args: Any, **kwargs: Any) -> SimpleNamespace:
    """Bind the arguments by name (query, key, value: ``[L, N, E]``, or ``[L, E]``); refuse what has no rule."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    packed = SimpleNamespace(**bound.arguments)
    if packed.static_k is not None or packed.static_v is not None:
        raise call.mode.refusal(call.name, "static_k and static_v have no rule")
    if packed.training and packed.dropout_p > 0.0:
        raise training_error("attention dropout" + call.mode.location())
    return packed


def _projections(packed: SimpleNamespace) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield input, weight and bias of each of the three linear layers."""
    weights = (packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight)
    if not packed.use_separate_proj_weight:
        weights = packed.in_proj_weight.chunk(3)
    biases = (None, None, None) if packed.in_proj_bias is None else packed.in_proj_bias.chunk(3)
    return zip((packed.query, packed.key, packed.value), weights, biases, strict=True)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape ``[L, N, E]`` or ``[L, E]`` to ``[N, heads, L, E / heads]``."""
    x = x if x.ndim == 3 else x.unsqueeze(1)
    return x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3)


def _append_rows(x: Tensor, bias: Tensor | None, *, zero: bool) -> Tensor:
    """Append a key or value ``[1, 1, E]`` that is learned, and one of zeros, to ``[N, heads, S, E / heads]``."""
    if bias is not None:
        x = torch.cat([x, _split_heads(bias, x.shape[1]).expand(len(x), -1, -1, -1)], 2)
    return torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) if zero else x


def _merge_masks(packed: SimpleNamespace, q: Tensor, k: Tensor) -> Tensor | None:
    """Merge the two masks of nn.MultiheadAttention (True means: do not attend) into one that is added to the scores."""
    merged, padding = packed.attn_mask, packed.key_padding_mask
    if merged is not None:
        merged = _additive_mask(merged, q)
        merged = merged.reshape(*q.shape[:2], *merged.shape[1:]) if merged.ndim == 3 else merged  # [N * heads, L, S]
    if padding is None:
        return merged  # type: ignore[no-any-return]
    padding = _additive_mask(padding, q).reshape(k.shape[0], 1, 1, k.shape[2])
    return padding if merged is None else merged + padding


def _additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf) if mask.dtype == torch.bool else mask


def is_attention(scores: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> bool:
    """Return whether a softmax makes attention, over the last axis of queries by keys, and not class probabilities."""
    return scores.ndim >= 3 and dim in (-1, scores.ndim - 1)
