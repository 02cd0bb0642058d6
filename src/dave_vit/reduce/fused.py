"""Weighted sums of samples in one pass over them (CUDA, Triton).

Importing this imports Triton, which takes seconds: it is imported where a GPU is met.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dave_vit.reduce.kernels import weighted_sums_kernel

_BLOCK = 256  # pixels


def weighted_sums(samples: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of samples [n,B,C,...] with weights [n,B] in float64: [B,C,...], [B,...] and [B,...] in float64."""
    n, batch, channels, *sides = samples.shape
    pixels = samples[0, 0, 0].numel()
    total = torch.empty(samples.shape[1:], dtype=torch.float64, device=samples.device)
    first, second = (torch.empty((batch, *sides), dtype=torch.float64, device=samples.device) for _ in range(2))
    with torch.cuda.device_of(samples):
        weighted_sums_kernel[(triton.cdiv(pixels, _BLOCK), batch)](
            *(samples.contiguous(), weights.contiguous(), total, first, second, n, batch),
            CHANNELS=channels,
            PIXELS=pixels,
            CHANNEL_TILE=triton.next_power_of_2(channels),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return total, first, second
