"""Attention without a whole matrix in memory: by kernels (CUDA, Triton), or in slices of the batch."""

import math
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit._internal.torch_private import choose_attention_kernel
from dave_vit.engine.calls import Call, Rule, carry
from dave_vit.engine.fast import kernels, register_substitute
from dave_vit.engine.rules.attention import AttentionArguments, scaled_dot_product_attention, values_gradient
from dave_vit.engine.states import is_carrier

_MAX_HEAD_DIM = 256  # head dimension up to which a tile fits
_SLICE_BYTES = 512 * 2**20  # attention matrices are rebuilt in slices of at most this size


@register_substitute(scaled_dot_product_attention)
def attention(plain: Rule, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Run fused attention; the matrix is rebuilt in parts on the way back."""
    arguments = AttentionArguments.bind(call, *args, **kwargs)
    if not is_carrier(arguments.value):
        return NotImplemented
    frozen, options = arguments.freeze(), arguments.score_options
    q, k, v, mask = frozen.query, frozen.key, frozen.value, frozen.mask
    if kernels_take(q, k, v, mask):
        mixed, lse = attention_and_log_sum_exp(frozen, call)
        return carry(lambda: mixed, partial(fused_values_gradient, **options), arguments.value, saved=(q, k, lse, mask))
    pullback = partial(_values_gradient_in_slices, shape=v.shape, options=options)
    return carry(lambda: frozen.compute(call), pullback, arguments.value, saved=(q, k, mask))


def _values_gradient_in_slices(
    grad: Tensor, query: Tensor, key: Tensor, mask: Tensor | None, *, shape: torch.Size, options: dict[str, Any]
) -> Tensor:
    """Compute A^T grad in slices of the batch, so that the matrices of one layer never exceed a fixed size."""
    row_bytes = math.prod(grad.shape[1:-1]) * key.shape[-2] * working_dtype(query.dtype).itemsize
    rows = max(1, _SLICE_BYTES // max(1, row_bytes))
    # Tensors with fewer dimensions, or one row, are broadcast and stay whole.
    sliced = [one is not None and one.ndim == grad.ndim and len(one) > 1 for one in (query, key, mask)]
    lengths = {shape[0], *(len(one) for one in (query, key, mask) if one is not None and one.ndim == grad.ndim)} - {1}
    if grad.ndim < 3 or len(grad) <= rows or lengths != {len(grad)}:
        return values_gradient(grad, query, key, mask, shape=shape, options=options)
    parts = []
    for start in range(0, len(grad), rows):
        rest: Any = zip((query, key, mask), sliced, strict=True)
        scoring = [one[start : start + rows] if has_rows else one for one, has_rows in rest]
        part = grad[start : start + rows]
        parts.append(values_gradient(part, *scoring, shape=torch.Size((len(part), *shape[1:])), options=options))
    return torch.cat(parts)


def kernels_take(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether the kernels take these tensors; others run in plain torch functions."""
    if not query.is_cuda or query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return False
    if query.dtype == torch.float32 and not _has_tf32(query.device):
        return False  # without the matrix units, plain products of the whole matrix are twice as fast
    if query.dtype not in kernels.DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        return False
    if value.shape[:3] != key.shape[:3] or len(query) != len(key) or query.shape[1] % key.shape[1]:
        return False
    fits = mask is None or mask.dtype == torch.bool or mask.is_floating_point()
    return fits and max(query.shape[-1], value.shape[-1]) <= _MAX_HEAD_DIM and kernels.are_available()


def attention_and_log_sum_exp(frozen: AttentionArguments, call: Call) -> tuple[Tensor, Tensor]:
    """Compute what attention returns, and the log-sum-exp of its scores: ``[B, Hq, L, Ev]`` and ``[B, Hq, L]``."""
    query, key, value, options = frozen.query, frozen.key, frozen.value, frozen.score_options
    if frozen.mask is None and query.shape[1] == key.shape[1] and query.shape[-1] == value.shape[-1]:
        fused = _torch_attention(query, key, value, **options)
        if fused is not None:
            return fused
    return frozen.compute(call), log_sum_exp(query, key, frozen.mask, **options)


def _torch_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """Run the kernel that torch itself would choose, if it is one that returns its log-sum-exp."""
    choice = choose_attention_kernel(query, key, value, is_causal=is_causal, scale=scale)
    aten, backend = torch.ops.aten, torch.nn.attention.SDPBackend
    if choice == backend.CUDNN_ATTENTION.value:
        cudnn = aten._scaled_dot_product_cudnn_attention
        results = cudnn(query, key, value, None, True, 0.0, is_causal, False, scale=scale)
    elif choice == backend.FLASH_ATTENTION.value and query.shape[-1] % 8 == 0:
        results = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
    elif choice == backend.EFFICIENT_ATTENTION.value:
        efficient = aten._scaled_dot_product_efficient_attention
        results = efficient(query, key, value, None, True, 0.0, is_causal, scale=scale)
    else:
        return None
    lse = results[1].squeeze(-1) if results[1].ndim == 4 else results[1]
    return results[0], lse[..., : query.shape[2]]  # some kernels pad it


def log_sum_exp(query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None) -> Tensor:
    """Compute log sum exp of the scores over the keys in float32: ``[B, Hq, L]``; -inf where all are masked."""
    options = _kernel_options(query, is_causal=is_causal, scale=scale)
    return kernels.load().log_sum_exp(query, key, _expand_mask(mask, query, key), **options)  # type: ignore[no-any-return]


def fused_values_gradient(
    grad: Tensor, query: Tensor, key: Tensor, lse: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None
) -> Tensor:
    """Compute A^T grad, ``[B, Hk, S, Ev]``, or ``[K, B, Hk, S, Ev]`` for K targets that share the matrix."""
    options = _kernel_options(query, is_causal=is_causal, scale=scale)
    grads = (grad if grad.ndim == 5 else grad.unsqueeze(0)).to(query.dtype)
    pulled: Tensor = kernels.load().values_gradient(grads, query, key, lse, _expand_mask(mask, query, key), **options)
    return pulled if grad.ndim == 5 else pulled.squeeze(0)


def _kernel_options(query: Tensor, *, is_causal: bool, scale: float | None) -> dict[str, Any]:
    """Return the options of the kernels; float32 is multiplied as three parts, without loss, unless TF32 is allowed."""
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    is_tf32 = query.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32
    return {"is_causal": is_causal, "scale": factor, "precision": "tf32" if is_tf32 else "tf32x3"}


def _expand_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Expand the mask to its full shape without a copy."""
    if mask is None:
        return None
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return mask.expand(*query.shape[:3], key.shape[2])


@cache
def _has_tf32(device: torch.device) -> bool:
    """Return whether a device multiplies parts of float32 numbers (TF32): NVIDIA's do since compute 8.0."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
