"""Convolutions whose windows lie side by side, such as patch embeddings, as products, which are much faster."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit.engine.calls import Call, Rule, carry
from dave_vit.engine.fast import register_substitute
from dave_vit.engine.rules.gamma import Gamma
from dave_vit.engine.rules.products import weighted_sum
from dave_vit.engine.states import depends_on_input, is_carrier


def are_windows_adjacent(
    input: Tensor, weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Return whether the windows of a convolution of images lie side by side."""
    adjacent = tuple(weight.shape[2:]) == _pair(stride) and _pair(padding) == (0, 0) and groups == 1
    return adjacent and _pair(dilation) == (1, 1) and input.ndim == 4


def _pair(size: Any) -> Any:
    return (size, size) if isinstance(size, int) else tuple(size)  # a padding may be a word, which is no pair


def prefers_product(input: Tensor) -> bool:
    """Return whether the product of windows is faster in the forward pass as well; else only in the backward pass."""
    return input.is_cuda


def _applies(
    plain: Rule, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> bool:
    is_flat = isinstance(plain, Gamma) and plain.flat  # which has a faster form of its own
    if call.name != "conv2d" or is_flat or not are_windows_adjacent(input, weight, *args, **kwargs):
        return False
    plain_parameters = not (depends_on_input(weight) or depends_on_input(bias))
    return prefers_product(input) or (is_carrier(input) and plain_parameters)


@register_substitute(weighted_sum, Gamma, applies=_applies)
def patch_convolution(
    plain: Rule, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Run the rule on the convolution as a product."""
    func = _product_of_windows if prefers_product(input) else _convolution_with_product_gradient
    return plain(Call(call.mode, func, call.name), input, weight, bias)


def windows_of(input: Tensor, weight: Tensor) -> Tensor:
    """Return the windows of a convolution that lie side by side: ``[B, rows * columns, C * height * width]``."""
    (height, width), (batch, channels) = weight.shape[2:], input.shape[:2]
    rows, columns = input.shape[2] // height, input.shape[3] // width
    whole = input[:, :, : rows * height, : columns * width]
    moved = whole.reshape(batch, channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
    return moved.reshape(batch, rows * columns, -1)


def arrange_in_grid(outputs: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """Reshape what a linear layer returned for the windows, ``[B, rows * columns, O]``, as the convolution does."""
    grid = (input.shape[2] // weight.shape[2], input.shape[3] // weight.shape[3])
    return outputs.transpose(1, 2).unflatten(2, grid)  # type: ignore[no-any-return]


def _product_of_windows(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return arrange_in_grid(F.linear(windows_of(input, weight), weight.flatten(1), bias), input, weight)


def _convolution_with_product_gradient(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    def compute() -> Tensor:
        return F.conv2d(input.detach(), weight, bias, tuple(weight.shape[2:]))

    return carry(compute, partial(_windows_gradient, shape=input.shape), input, saved=(weight,))


def _windows_gradient(grad: Tensor, weight: Tensor, *, shape: torch.Size) -> Tensor:
    """Compute the gradient ``[B, C, H, W]`` of an image out of that of its convolution ``[B, O, rows, columns]``."""
    (height, width), (rows, columns) = weight.shape[2:], grad.shape[2:]
    pulled = grad.flatten(2).transpose(1, 2) @ weight.flatten(1).conj().to(grad.dtype)  # as ``windows_of`` has them
    parts = pulled.reshape(len(grad), rows, columns, -1, height, width).permute(0, 3, 1, 4, 2, 5)
    whole = parts.reshape(len(grad), -1, rows * height, columns * width)
    rest = (0, shape[3] - whole.shape[3], 0, shape[2] - whole.shape[2])  # pixels that fill no window
    return F.pad(whole, rest) if any(rest) else whole
