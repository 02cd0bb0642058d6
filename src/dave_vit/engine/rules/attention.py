"""Attention: the matrix is frozen, only the values carry gradient (appendix A, self-attention)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.calls import Call, carry
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

    def matrix(self) -> Tensor:
        """Compute the attention matrix inside of the function: ``[..., Hq, L, S]``."""
        return attention_matrix(self.query, self.key, self.mask, **self.score_options)

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
        return call.mode.run_frozen(call, *args, **kwargs)  # type: ignore[no-any-return]
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
    arguments = AttentionArguments.bind(call, *args, **kwargs)
    with call.mode:
        return arguments.matrix() @ repeat_heads(arguments.value, arguments.query)


# Torch's own code, without the first lines, by which the interception would get the whole call again.
attend_in_parts = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda arguments: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def multi_head_attention(call: Call, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` in its parts, so that each part meets its own rule."""
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    if given.get("static_k") is not None or given.get("static_v") is not None:
        raise call.mode.refusal(call.name, "static_k and static_v have no rule")
    with call.mode:
        if not given.get("use_separate_proj_weight"):  # apart, so that only the layer of the values has a derivative
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            given |= zip(names, given["in_proj_weight"].chunk(3), strict=True)
        return attend_in_parts(**{**given, "use_separate_proj_weight": True})  # type: ignore[no-any-return]


def is_attention(scores: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> bool:
    """Return whether a softmax makes attention, over the last axis of queries by keys, and not class probabilities."""
    return scores.ndim >= 3 and dim in (-1, scores.ndim - 1)
