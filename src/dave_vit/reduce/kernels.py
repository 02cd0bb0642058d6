"""Triton kernel: weighted sums of samples."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "batch"])  # any number of samples and images is one kernel
def weighted_sums_kernel(
    samples,  # [n, B, CHANNELS, PIXELS]
    weights,  # [n, B]
    total,  # [B, CHANNELS, PIXELS]
    first,  # [B, PIXELS]
    second,  # [B, PIXELS]
    n,
    batch,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of some pixels of one image: sums of w x, w^2 s and w^2 s^2, with s the sum of x over its channels."""
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNEL_TILE)
    inside = (channel[:, None] < CHANNELS) & (pixel[None, :] < PIXELS)
    here = channel[:, None] * PIXELS + pixel[None, :]
    of_all = tl.zeros((CHANNEL_TILE, BLOCK), tl.float64)
    of_sums = tl.zeros((BLOCK,), tl.float64)
    of_squares = tl.zeros((BLOCK,), tl.float64)
    for number in range(n):
        row = number * batch + image
        weight = tl.load(weights + row)
        x = tl.load(samples + row * CHANNELS * PIXELS + here, mask=inside, other=0.0).to(tl.float64)
        s = tl.sum(x, 0)
        of_all += weight * x
        of_sums += weight * weight * s
        of_squares += weight * weight * s * s
    tl.store(total + image * CHANNELS * PIXELS + here, of_all, mask=inside)
    tl.store(first + image * PIXELS + pixel, of_sums, mask=pixel < PIXELS)
    tl.store(second + image * PIXELS + pixel, of_squares, mask=pixel < PIXELS)
