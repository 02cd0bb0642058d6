"""Launches the kernels; those that compiled graphs need are operators of torch as well.

Importing this imports Triton and torch's compiler, which takes seconds: it is imported when tensors are on a GPU.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
import triton
from torch import Tensor

from dave_vit._internal.torch_private import is_dispatch_traced
from dave_vit.engine.fast.kernels.triton_kernels import (
    add_favoured_kernel,
    center_gradient_kernel,
    gate_gradient_kernel,
    log_sum_exp_kernel,
    row_sizes_kernel,
    share_gradient_kernel,
    values_gradient_kernel,
    weighted_sums_kernel,
)

_P = ParamSpec("_P")


def _operator(launch: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Make an operator that tracers see; elsewhere its function is called, since dispatching takes 0.1 ms and more.

    The function must name ``wrap_triton`` where it launches, by which torch finds the kernels of an operator.
    """
    operator = torch.library.triton_op(f"dave_vit::{launch.__name__}", launch, mutates_args={})  # torch 2.6 and later

    @wraps(launch)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        if is_dispatch_traced():
            return operator(*args, **kwargs)  # type: ignore[no-any-return]
        with torch.cuda.device_of(args[0]):  # Triton launches on the current device
            return launch(*args, **kwargs)

    return call


def wrap_triton(kernel: Any) -> Any:
    """Return the kernel in the form that tracers see; without a tracer as it is, as an interpreted one must be."""
    return torch.library.wrap_triton(kernel) if is_dispatch_traced() else kernel


@_operator
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
    """Compute A^T grad for targets that share the matrix: ``[K, B, Hk, S, Ev]``."""
    targets, batch, _, length, wide = grad.shape
    heads, keys = key.shape[1:3]
    out = torch.empty((targets, batch, keys, heads, wide), dtype=grad.dtype, device=grad.device).transpose(2, 3)
    tile = _tile(query, wide, targets)
    grid = (triton.cdiv(keys, tile["KEYS"]), batch * heads, triton.cdiv(targets, tile["TARGET_TILE"]))
    masked = (query, (0, 0, 0, 0)) if mask is None else (mask, mask.stride())
    strides = (*_strides(grad), *query.stride(), *key.stride(), *lse.stride(), *masked[1], *_strides(out)[:4])
    wrap_triton(values_gradient_kernel)[grid](
        *(grad, query, key, lse, masked[0], out),
        *strides,
        scale=scale,
        TARGETS=targets,
        HEADS=heads,
        GROUP=query.shape[1] // heads,
        L=length,
        S=keys,
        E=query.shape[3],
        EV=wide,
        CAUSAL=is_causal,
        MASK=_mask_kind(mask),
        PRECISION=precision,
        **tile,
    )
    return out


@_operator
def log_sum_exp(
    query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, precision: str
) -> Tensor:
    """Compute the log-sum-exp of the scores of each query: ``[B, Hq, L]``."""
    batch, heads, length, dim = query.shape
    out = torch.empty((batch, heads, length), dtype=torch.float32, device=query.device)
    masked = (query, (0, 0, 0, 0)) if mask is None else (mask, mask.stride())
    wrap_triton(log_sum_exp_kernel)[(triton.cdiv(length, 64), batch * heads)](
        *(query, key, masked[0], out),
        *(*query.stride(), *key.stride(), *masked[1]),
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
        MASK=_mask_kind(mask),
        PRECISION=precision,
        num_warps=4,
        num_stages=2,
    )
    return out


def gate_gradient(grad: Tensor, x: Tensor, *, kind: str, at_zero: float) -> Tensor:
    """Compute grad * phi(x) for contiguous tensors of one shape; ``kind`` is "gelu", "tanh" or "silu"."""
    out = torch.empty_like(grad)
    grid = (triton.cdiv(grad.numel(), 1024),)
    gate_gradient_kernel[grid](grad, x, out, grad.numel(), AT_ZERO=at_zero, KIND=kind, BLOCK=1024, num_warps=4)
    return out


def center_gradient(grad: Tensor, inverse: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute (g - mean g) * inverse with g = grad * weight, for [rows, width], [rows] and [width], all contiguous."""
    rows, width = grad.shape
    out = torch.empty_like(grad, dtype=dtype)
    block = _power_of_two(width)
    scale = inverse if weight is None else weight
    center_gradient_kernel[(rows,)](
        *(grad, inverse, scale, out),
        WEIGHT=weight is not None,
        WIDTH=width,
        BLOCK=block,
        num_warps=max(4, min(16, block // 512)),
    )
    return out


def row_sizes(x: Tensor, of_input: Tensor) -> Tensor:
    """Compute the mean of |x| in each row, weighted by ``of_input``: [rows] for [rows, I] and [I], both contiguous."""
    rows, width = x.shape
    out = torch.empty(rows, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # on the way back autograd has chosen it
        row_sizes_kernel[(rows,)](x, of_input, out, WIDTH=width, **_row_tile(width))
    return out


def share_gradient(
    grad: Tensor, value: Tensor, size: Tensor, bias: Tensor | None, of_output: Tensor, favour: float
) -> tuple[Tensor, Tensor]:
    """Compute grad * |s|, and in each row the mean of grad * s: [rows, O] and [rows]; all contiguous."""
    rows, width = grad.shape
    out, summed = torch.empty_like(grad), torch.empty_like(size)
    shift = of_output if bias is None else bias
    share_gradient_kernel[(rows,)](
        grad, value, size, shift, of_output, out, summed, favour, BIAS=bias is not None, WIDTH=width, **_row_tile(width)
    )
    return out, summed


def add_favoured_(plain: Tensor, like: Tensor, summed: Tensor, of_input: Tensor, favour: float) -> None:
    """Add c sign(like) summed of_input to ``plain``, for [rows, I], [rows, I], [rows] and [I], all contiguous."""
    rows, width = plain.shape
    tile = _row_tile(width)
    grid = (rows, triton.cdiv(width, tile["BLOCK"]))
    add_favoured_kernel[grid](plain, like, summed, of_input, favour, WIDTH=width, **tile)


def weighted_sums(samples: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum samples [n,B,C,...] with weights [n,B] in float64: [B,C,...], [B,...] and [B,...] in float64."""
    n, batch, channels, *sides = samples.shape
    block = 256  # pixels
    pixels = samples[0, 0, 0].numel()
    total = torch.empty(samples.shape[1:], dtype=torch.float64, device=samples.device)
    first, second = (torch.empty((batch, *sides), dtype=torch.float64, device=samples.device) for _ in range(2))
    with torch.cuda.device_of(samples):
        weighted_sums_kernel[(triton.cdiv(pixels, block), batch)](
            *(samples.contiguous(), weights.contiguous(), total, first, second, n, batch),
            CHANNELS=channels,
            PIXELS=pixels,
            CHANNEL_TILE=triton.next_power_of_2(channels),
            BLOCK=block,
            num_warps=4,
        )
    return total, first, second


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor with a leading dimension of targets, 0 for that of a single target.

    It would be the size of the batch, for each of which the kernel would be compiled again.
    """
    first, *rest = tensor.stride()
    return (first if len(tensor) > 1 else 0, *rest)


def _row_tile(width: int) -> dict[str, int]:
    """Return how much of a row is read at a time: 16 bytes a thread in half types."""
    return {"BLOCK": min(1024, _power_of_two(width)), "num_warps": 4}


def _mask_kind(mask: Tensor | None) -> str:
    return "none" if mask is None else "boolean" if mask.dtype == torch.uint8 else "additive"


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())  # matrix units take no less than 16


def _tile(query: Tensor, wide: int, targets: int) -> dict[str, int]:
    """Return the sizes of a tile: 128 keys x 32 queries measured best for head dimension 64 on an H200."""
    e, ev = _power_of_two(query.shape[-1]), _power_of_two(wide)
    together = max(1, min(1 << (targets - 1).bit_length(), 256 // ev))
    large = max(e, together * ev) > 64
    single = query.dtype == torch.float32
    keys = 64 if max(e, ev) > 64 or (single and large) else 128
    return {
        "E_TILE": e,
        "EV_TILE": ev,
        "TARGET_TILE": together,
        "KEYS": keys,
        "QUERIES": 32,
        "num_warps": 8 if large else 4,
        "num_stages": 2 if single else 3,
    }
