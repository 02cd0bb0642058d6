"""The kernels as operators of torch, which compiled graphs see through.

Importing this imports Triton and torch's compiler, which takes seconds: it is imported where a GPU is met.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dave_vit.rules.fused.kernels import gate_gradient_kernel, log_sum_exp_kernel, values_gradient_kernel

_wrap = torch.library.wrap_triton  # torch 2.6 and later


@torch.library.triton_op("dave_vit::values_gradient", mutates_args={})
def values_gradient(
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
    """A^T grad for targets that share the matrix: [K, B, Hk, S, Ev]."""
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
def log_sum_exp(
    query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, precision: str
) -> Tensor:
    """Of the scores of each query: [B, Hq, L]."""
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


@torch.library.triton_op("dave_vit::gate_gradient", mutates_args={})
def gate_gradient(grad: Tensor, x: Tensor, *, kind: str, at_zero: float) -> Tensor:
    """grad * phi(x) for contiguous tensors of one shape."""
    out = torch.empty_like(grad)
    grid = (triton.cdiv(grad.numel(), 1024),)
    _wrap(gate_gradient_kernel)[grid](grad, x, out, grad.numel(), AT_ZERO=at_zero, KIND=kind, BLOCK=1024, num_warps=4)
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
