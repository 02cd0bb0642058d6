"""What goes back through a layer norm with sigma frozen, in one kernel (CUDA, Triton)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dave_vit.engine.fast.kernels.attention import operators, takes

_WIDEST = 16384  # numbers up to which a row stays in registers


def applicable(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether the kernel takes a norm of this input over dimensions of this shape; others run in plain functions."""
    return math.prod(shape) <= _WIDEST and takes(x)


def centred(grad: Tensor, inverse: Tensor, weight: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """(g - mean g) / sigma with g = grad * gamma.

    Args:
        grad: of what the norm returned.
        inverse: 1 / sigma, one for each row.
        weight: gamma, in the shape of a row.
        dtype: of the result.
    """
    rows = grad.reshape(inverse.numel(), -1).contiguous()
    flat = None if weight is None else weight.reshape(-1).contiguous()
    pulled: Tensor = operators().centred(rows, inverse.reshape(-1), flat, dtype)
    return pulled.view(grad.shape)
