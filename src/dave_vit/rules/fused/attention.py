"""Attention of which only the values carry gradient, without an attention matrix in memory (CUDA, Triton)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

try:
    import triton

    from dave_vit.rules.fused.kernels import log_sum_exp_kernel, values_gradient_kernel

    _wrap = torch.library.wrap_triton  # torch 2.6 and later
    AVAILABLE = True
except (ImportError, AttributeError):
    AVAILABLE = False

_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 256  # head dimension up to which a tile fits


def applicable(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels take these tensors; what they do not take runs in plain torch functions."""
    if not AVAILABLE or query.device.type != "cuda" or query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return False
    if query.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return False  # without the matrix units, plain products of the whole matrix are twice as fast
    if query.dtype not in _TYPES or {key.dtype, value.dtype} != {query.dtype} or value.shape[:3] != key.shape[:3]:
        return False
    if len(query) != len(key) or query.shape[1] % key.shape[1] or max(query.shape[-1], value.shape[-1]) > _WIDEST:
        return False
    return mask is None or mask.dtype == torch.bool or mask.is_floating_point()


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
    found: Tensor = _log_sum_exp(query, key, spread, **options)
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
    pulled: Tensor = _values_gradient(several.to(query.dtype), query, key, lse, _spread(mask, query, key), **options)
    return pulled if grad.ndim == 5 else pulled.squeeze(0)


def _spread(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask in its full shape, without a copy."""
    if mask is None:
        return None
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return mask.expand(*query.shape[:3], key.shape[2])


def _precision(query: Tensor) -> str:
    return "tf32" if query.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


if AVAILABLE:

    @torch.library.triton_op("dave_vit::values_gradient", mutates_args={})
    def _values_gradient(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        *,
        is_causal: bool,
        scale: float,
        precision: str,
    ) -> Tensor:
        targets, batch, _, length, wide = grad.shape
        heads, keys = key.shape[1:3]
        out = torch.empty((targets, batch, keys, heads, wide), dtype=grad.dtype, device=grad.device).transpose(2, 3)
        tile = _tile(query, wide, targets)
        grid = (triton.cdiv(keys, tile["KEYS"]), batch * heads, triton.cdiv(targets, tile["TARGET_TILE"]))
        masked = (query, (0, 0, 0, 0)) if mask is None else (mask, mask.stride())
        _wrap(values_gradient_kernel)[grid](
            grad,
            query,
            key,
            lse,
            masked[0],
            out,
            *grad.stride(),
            *query.stride(),
            *key.stride(),
            *lse.stride(),
            *masked[1],
            *out.stride()[:4],
            scale=scale,
            TARGETS=targets,
            HEADS=heads,
            GROUP=query.shape[1] // heads,
            L=length,
            S=keys,
            E=query.shape[3],
            EV=wide,
            CAUSAL=is_causal,
            MASK=_kind(mask),
            PRECISION=precision,
            **tile,
        )
        return out

    @torch.library.triton_op("dave_vit::log_sum_exp", mutates_args={})
    def _log_sum_exp(
        query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, precision: str
    ) -> Tensor:
        batch, heads, length, dim = query.shape
        out = torch.empty((batch, heads, length), dtype=torch.float32, device=query.device)
        masked = (query, (0, 0, 0, 0)) if mask is None else (mask, mask.stride())
        _wrap(log_sum_exp_kernel)[(triton.cdiv(length, 64), batch * heads)](
            query,
            key,
            masked[0],
            out,
            *query.stride(),
            *key.stride(),
            *masked[1],
            scale=scale,
            HEADS=heads,
            GROUP=heads // key.shape[1],
            L=length,
            S=key.shape[2],
            E=dim,
            E_TILE=_power_of_two(dim),
            KEYS=64,
            QUERIES=64,
            CAUSAL=is_causal,
            MASK=_kind(mask),
            PRECISION=precision,
            num_warps=4,
            num_stages=2,
        )
        return out


def _kind(mask: Tensor | None) -> str:
    return "none" if mask is None else "boolean" if mask.dtype == torch.uint8 else "additive"


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())  # matrix units take no less than 16


def _tile(query: Tensor, wide: int, targets: int) -> dict[str, int]:
    """Sizes of a tile: 128 keys x 32 queries measured best for head dimension 64 in half types on an H200."""
    e, ev = _power_of_two(query.shape[-1]), _power_of_two(wide)
    together = max(1, min(1 << (targets - 1).bit_length(), 256 // ev))
    large = max(e, together * ev) > 64
    keys = 64 if query.dtype == torch.float32 or max(e, ev) > 64 else 128
    return {
        "E_TILE": e,
        "EV_TILE": ev,
        "TARGET_TILE": together,
        "KEYS": keys,
        "QUERIES": 32,
        "num_warps": 8 if large else 4,
        "num_stages": 3,
    }
