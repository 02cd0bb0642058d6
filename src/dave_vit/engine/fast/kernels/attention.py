"""Attention of which only the values carry gradient, without an attention matrix in memory (CUDA, Triton)."""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

TYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 256  # head dimension up to which a tile fits


def applicable(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels take these tensors; what they do not take runs in plain torch functions."""
    if query.device.type != "cuda" or query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return False
    if query.dtype == torch.float32 and not _splits(query.device):
        return False  # without the matrix units, plain products of the whole matrix are twice as fast
    if query.dtype not in TYPES or {key.dtype, value.dtype} != {query.dtype} or value.shape[:3] != key.shape[:3]:
        return False
    if len(query) != len(key) or query.shape[1] % key.shape[1] or max(query.shape[-1], value.shape[-1]) > _WIDEST:
        return False
    fits = mask is None or mask.dtype == torch.bool or mask.is_floating_point()
    return fits and operators() is not None


@cache
def operators() -> Any:
    """The module of the kernels; None where torch or Triton is too old for them."""
    try:
        return import_module("dave_vit.engine.fast.kernels.operators")
    except (ImportError, AttributeError):
        return None


def takes(*tensors: Tensor | None) -> bool:
    """Whether these tensors are where kernels run and of types that they know, and the kernels are there."""
    fits = all(one is None or (one.is_cuda and one.dtype in TYPES) for one in tensors)
    return fits and operators() is not None


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None, plain: Any
) -> tuple[Tensor, Tensor]:
    """What attention returns, and the log-sum-exp of its scores: [B, Hq, L, Ev] and [B, Hq, L].

    Args:
        query: [B, Hq, L, E].
        key: [B, Hk, S, E].
        value: [B, Hk, S, Ev].
        mask: boolean or additive, broadcastable to [B, Hq, L, S].
        is_causal: whether a query sees only keys up to its own place.
        scale: factor of the scores; 1 / sqrt(E) by default.
        plain: the attention to run where torch's fused kernels do not tell their log-sum-exp.
    """
    if mask is None and query.shape[1] == key.shape[1] and query.shape[-1] == value.shape[-1]:
        fused = _torch_fused(query, key, value, is_causal=is_causal, scale=scale)
        if fused is not None:
            return fused
    return plain(), log_sum_exp(query, key, mask, is_causal=is_causal, scale=scale)


def _torch_fused(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """The kernel that torch itself would choose, if it is one that gives its log-sum-exp away."""
    choice = torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, scale=scale)
    aten, backend = torch.ops.aten, torch.nn.attention.SDPBackend
    if choice == backend.CUDNN_ATTENTION.value:
        cudnn = aten._scaled_dot_product_cudnn_attention
        found = cudnn(query, key, value, None, True, 0.0, is_causal, False, scale=scale)
    elif choice == backend.FLASH_ATTENTION.value and query.shape[-1] % 8 == 0:
        found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
    elif choice == backend.EFFICIENT_ATTENTION.value:
        efficient = aten._scaled_dot_product_efficient_attention
        found = efficient(query, key, value, None, True, 0.0, is_causal, scale=scale)
    else:
        return None
    lse = found[1].squeeze(-1) if found[1].ndim == 4 else found[1]
    return found[0], lse[..., : query.shape[2]]  # some kernels fill it up


def log_sum_exp(query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None) -> Tensor:
    """log sum exp over the keys of the attention scores, in float32: [B, Hq, L]; -inf where a query sees nothing."""
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    spread = _spread(mask, query, key)
    options = {"is_causal": is_causal, "scale": factor, "precision": _precision(query)}
    found: Tensor = operators().log_sum_exp(query, key, spread, **options)
    return found


def values_gradient(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """A^T grad: [B, Hk, S, Ev]; with a leading dimension of targets, which share the matrix, [K, B, Hk, S, Ev]."""
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    several = grad if grad.ndim == 5 else grad.unsqueeze(0)
    options = {"is_causal": is_causal, "scale": factor, "precision": _precision(query)}
    pulled: Tensor = operators().values_gradient(
        several.to(query.dtype), query, key, lse, _spread(mask, query, key), **options
    )
    return pulled if grad.ndim == 5 else pulled.squeeze(0)


def _spread(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask in its full shape, without a copy."""
    if mask is None:
        return None
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return mask.expand(*query.shape[:3], key.shape[2])


def _precision(query: Tensor) -> str:
    """How products are made of float32: as three products of parts, which lose nothing, unless the user allows TF32."""
    return "tf32" if query.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@cache
def _splits(device: torch.device) -> bool:
    """Whether the matrix units of a device take parts of float32 numbers (TF32): NVIDIA's do since compute 8.0."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
