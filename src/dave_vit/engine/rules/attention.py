"""Attention: the matrix is frozen, only the values carry gradient (appendix A, self-attention)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.calls import Call
from dave_vit.engine.fast.kernels import attention as fused
from dave_vit.engine.states import is_carrier, map_tensors
from dave_vit.engine.surrogate import carry
from dave_vit.errors import training_error

_PACKED = inspect.signature(F.multi_head_attention_forward)
_SLICE_BYTES = 512 * 2**20  # attention matrices are rebuilt in slices of at most this size


def attention_matrix(
    query: Tensor,  # [..., Hq, L, E]
    key: Tensor,  # [..., Hk, S, E]
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(Q K^T * scale + mask), as ``scaled_dot_product_attention`` computes it inside: [..., Hq, L, S].

    In at least float32 until the end: half types would round scores before they are exponentiated. A query that may
    look at no key gets a row of zeros.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    wide = working_dtype(query.dtype)
    scores = (query.to(wide) * scale) @ shared_heads(key, query).to(wide).transpose(-2, -1)
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if attn_mask is None:
        return scores.softmax(-1).to(query.dtype)
    scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    blind = scores.isneginf().all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(blind, 0.0).to(query.dtype)


def shared_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values with as many heads as the query: in grouped-query attention each serves several query heads."""
    if tensor.ndim < 3 or query.ndim < 3 or tensor.shape[-3] >= query.shape[-3]:
        return tensor
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """The arguments of one call of ``scaled_dot_product_attention``.

    Attributes:
        query: ``[..., Hq, L, E]``.
        key: ``[..., Hk, S, E]``.
        value: ``[..., Hk, S, Ev]``.
        mask: added to the scores, or True where a query may look.
        options: the others, such as ``is_causal`` and ``scale``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        call: Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001
        **options: Any,
    ) -> FusedAttention:
        """As they were given; refused where dropout is active."""
        if dropout_p > 0.0:
            raise training_error("attention dropout" + call.mode.location())
        return cls(query, key, value, attn_mask, {"is_causal": is_causal, **options})

    def compute(self, call: Call) -> Tensor:
        """What the function returns."""
        return call.func(self.query, self.key, self.value, self.mask, **self.options)  # type: ignore[no-any-return]

    def matrix(self) -> Tensor:
        """The attention matrix that the function never shows: ``[..., Hq, L, S]``."""
        return attention_matrix(self.query, self.key, self.mask, **self.scoring)

    @property
    def scoring(self) -> dict[str, Any]:
        """The options that shape the matrix."""
        return {"is_causal": self.options["is_causal"], "scale": self.options.get("scale")}


def scaled_dot_product_attention(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Fused attention stays fused; its derivative is the transposed attention matrix, rebuilt layer by layer."""
    given = FusedAttention.of(call, *args, **kwargs)
    if not is_carrier(given.value):
        return call.mode.run_frozen(call, *args, **kwargs)  # type: ignore[no-any-return]
    q, k, v, mask = map_tensors(_as_computed, [given.query, given.key, given.value, given.mask])
    frozen, scoring = replace(given, query=q, key=k, value=v, mask=mask), given.scoring
    if fused.applicable(q, k, v, mask):
        mixed, lse = fused.attention(q, k, v, mask, plain=lambda: frozen.compute(call), **scoring)
        pullback = partial(fused.values_gradient, **scoring)
        return carry(lambda: mixed, pullback, given.value, saved=(q, k, lse, mask))
    pullback = partial(_values_gradient, shape=given.value.shape, scoring=scoring)
    return carry(lambda: frozen.compute(call), pullback, given.value, saved=(q, k, mask))


def _as_computed(tensor: Tensor) -> Tensor:
    """Without gradient, in the type in which autocast runs attention."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.detach().to(torch.get_autocast_dtype(kind))
    return tensor.detach()


def spelled_out(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Fused attention as products and a softmax, each of which meets its own rule."""
    given = FusedAttention.of(call, *args, **kwargs)
    with call.mode:
        return given.matrix() @ shared_heads(given.value, given.query)


def _values_gradient(
    grad: Tensor, query: Tensor, key: Tensor, mask: Tensor | None, *, shape: torch.Size, scoring: dict[str, Any]
) -> Tensor:
    """A^T grad, in slices of the batch so that the matrices of one layer never exceed a fixed size."""
    if grad.ndim == 2:
        return _values_gradient(grad.unsqueeze(0), query, key, mask, shape=shape, scoring=scoring)
    batch = grad.shape[:-2]  # of the result, to which queries, keys and masks may broadcast
    query = query.expand(*batch, -1, -1)
    heads = key.shape[-3] if key.ndim > 2 and key.shape[-3] > 1 else batch[-1]  # fewer heads than queries: shared
    key = key.expand(*batch[:-1], heads, -1, -1)
    mask = mask.expand(*batch, -1, key.shape[-2]) if mask is not None else None
    row_bytes = math.prod(query.shape[1:-1]) * key.shape[-2] * working_dtype(query.dtype).itemsize
    rows = max(1, _SLICE_BYTES // max(1, row_bytes))
    parts = []
    for part in (slice(start, start + rows) for start in range(0, len(query), rows)):
        matrix = attention_matrix(query[part], key[part], mask[part] if mask is not None else None, **scoring)
        parts.append(matrix.transpose(-2, -1) @ grad[part].to(matrix.dtype))  # [..., Hq, S, Ev]
    pulled = torch.cat(parts) if len(parts) > 1 else parts[0]
    if len(shape) > 2 and 1 < shape[-3] < batch[-1]:  # heads that share one value head add up
        pulled = pulled.unflatten(-3, (shape[-3], -1)).sum(-3)
    return pulled.sum_to_size(shape)


def multi_head_attention(call: Call, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` in its parts, so that each part meets its own rule."""
    bound = _PACKED.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)  # query, key, value: [L, N, E], or [L, E] without a batch
    if given.add_zero_attn or any(
        part is not None for part in (given.bias_k, given.bias_v, given.static_k, given.static_v)
    ):
        raise call.mode.refusal(call.name, "bias_k, bias_v, static_k, static_v and add_zero_attn have no rule")
    if given.training and given.dropout_p > 0.0:
        raise training_error("attention dropout" + call.mode.location())
    with call.mode:
        q, k, v = (_heads(F.linear(*part), given.num_heads) for part in _projections(given))  # [N, heads, L, E/heads]
        mask = _merged_mask(given.attn_mask, given.key_padding_mask, q, k)
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
        mixed = mixed.permute(2, 0, 1, 3).flatten(2)  # [L, N, E]
        out = F.linear(mixed.reshape(given.query.shape), given.out_proj_weight, given.out_proj_bias)
    if not given.need_weights:
        return out, None
    matrix = attention_matrix(q.detach(), k.detach(), mask)  # [N, heads, L, S]
    matrix = matrix.mean(1) if given.average_attn_weights else matrix
    return out, matrix if given.query.ndim == 3 else matrix[0]


def _projections(given: SimpleNamespace) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Input, weight and bias of each of the three linear layers."""
    separate = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
    packed = given.in_proj_weight is not None and not given.use_separate_proj_weight
    weights = given.in_proj_weight.chunk(3) if packed else separate
    biases = given.in_proj_bias.chunk(3) if given.in_proj_bias is not None else (None, None, None)
    return zip((given.query, given.key, given.value), weights, biases, strict=True)


def _heads(x: Tensor, heads: int) -> Tensor:
    x = x if x.ndim == 3 else x.unsqueeze(1)  # [L, N, E]
    return x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3)


def _merged_mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """One additive mask out of the two that nn.MultiheadAttention takes (True means: do not look)."""
    merged = None
    for mask, shape in ((attn_mask, None), (padding, (k.shape[0], 1, 1, k.shape[2]))):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask, -math.inf)
        if shape is not None:
            mask = mask.reshape(shape)
        elif mask.ndim == 3:  # [N * heads, L, S]
            mask = mask.reshape(q.shape[0], q.shape[1], *mask.shape[1:])
        merged = mask if merged is None else merged + mask
    return merged


def is_attention(scores: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> bool:
    """Whether a softmax makes attention, over the last axis of queries by keys, and not class probabilities."""
    return scores.ndim >= 3 and dim in (-1, scores.ndim - 1)


def softmax(call: Call, *args: Any, **kwargs: Any) -> Any:
    """An attention matrix written out: frozen. No loss of the value path, so it is not recorded as one."""
    if args and not is_attention(*args, **kwargs):
        return call.mode.run_frozen(call, *args, **kwargs)
    return call.func(*map_tensors(Tensor.detach, args), **map_tensors(Tensor.detach, kwargs))
