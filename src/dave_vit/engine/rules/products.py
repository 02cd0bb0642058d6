"""Products, quotients and powers: which of the tensors that meet carries on, and which are held (see ``states``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.calls import Call
from dave_vit.engine.function_names import SCALINGS
from dave_vit.engine.rules.linear import affine
from dave_vit.engine.states import (
    State,
    depends_on_input,
    is_carrier,
    mark,
    mixed_state,
    product_state,
    state_of,
    sum_state,
    tensors,
    without_gates,
)
from dave_vit.engine.surrogate import carry


def product(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Products: operators and constants scale or mix the one carrier.

    Of two carriers, an activation's output is the gate and is held (SwiGLU, GEGLU, B-cos); without a gate the product
    is a score such as Q K^T, or a square, and can only become an operator.
    """
    state = product_state(map(state_of, tensors((args, kwargs))))
    if state is State.OPERATOR:
        return call.mode.run_frozen(call, *args, **kwargs)
    args, kwargs = without_gates((args, kwargs))
    return mark(affine(call, *args, **kwargs), state if _scales(call, *args) else mixed_state(state))


def weighted(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Linear layers and convolutions: a product, to which the bias is added."""
    state = sum_state([product_state([state_of(input), state_of(weight)]), state_of(bias)])
    if state is State.OPERATOR:
        return call.mode.run_frozen(call, input, weight, bias, *args, **kwargs)
    return mark(affine(call, *without_gates((input, weight)), bias, *args, **kwargs), mixed_state(state))


def convolution(
    call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """A convolution whose windows lie side by side is a plain product, which is computed several times faster."""
    apart = side_by_side(input, weight, *args, **kwargs)
    if apart and products_win(input):
        return weighted(Call(call.mode, _patch_product, call.name), input, weight, bias)
    if apart and is_carrier(input) and not (depends_on_input(weight) or depends_on_input(bias)):
        return weighted(Call(call.mode, _patch_convolution, call.name), input, weight, bias)
    return weighted(call, input, weight, bias, *args, **kwargs)


def side_by_side(
    input: Tensor,
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether the windows of a convolution of pictures lie side by side."""
    apart = tuple(weight.shape[2:]) == _pair(stride) and _pair(padding) == (0, 0) and groups == 1
    return apart and _pair(dilation) == (1, 1) and input.ndim == 4


def products_win(input: Tensor) -> bool:
    """Whether the product of windows is quicker on the way there as well; else only on the way back."""
    return input.is_cuda


def _pair(size: Any) -> Any:
    return (size, size) if isinstance(size, int) else tuple(size)  # a padding may be a word, which is no pair


def patches(input: Tensor, weight: Tensor) -> Tensor:
    """The windows of a convolution that lie side by side: ``[B, rows * columns, C * height * width]``."""
    (height, width), (batch, channels) = weight.shape[2:], input.shape[:2]
    rows, columns = input.shape[2] // height, input.shape[3] // width
    whole = input[:, :, : rows * height, : columns * width]
    moved = whole.reshape(batch, channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
    return moved.reshape(batch, rows * columns, -1)


def in_grid(made: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """What a linear layer made of the windows, ``[B, rows * columns, O]``, as the convolution returns it."""
    grid = (input.shape[2] // weight.shape[2], input.shape[3] // weight.shape[3])
    return made.transpose(1, 2).unflatten(2, grid)  # type: ignore[no-any-return]


def _patch_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = torch.nn.functional.linear(patches(input, weight), weight.flatten(1), bias)
    return in_grid(made, input, weight)


def _patch_convolution(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution itself, with a product on the way back."""

    def value() -> Tensor:
        return torch.nn.functional.conv2d(input.detach(), weight, bias, tuple(weight.shape[2:]))

    return carry(value, partial(_of_windows, shape=input.shape), input, saved=(weight,))


def _of_windows(grad: Tensor, weight: Tensor, *, shape: torch.Size) -> Tensor:
    """What goes back to a picture ``[B, C, H, W]`` of whose windows side by side ``[B, O, rows, columns]`` was made."""
    (height, width), (rows, columns) = weight.shape[2:], grad.shape[2:]
    pulled = grad.flatten(2).transpose(1, 2) @ weight.flatten(1).to(grad.dtype)  # as ``patches`` has them
    parts = pulled.reshape(len(grad), rows, columns, -1, height, width).permute(0, 3, 1, 4, 2, 5)
    whole = parts.reshape(len(grad), -1, rows * height, columns * width)
    left = (0, shape[3] - whole.shape[3], 0, shape[2] - whole.shape[2])  # pixels that fill no window
    return torch.nn.functional.pad(whole, left) if any(left) else whole


def fused_product(call: Call, addend: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> Any:
    """An addend plus a product: attention scores with a mask, scale and shift."""
    state = sum_state([state_of(addend), product_state([state_of(left), state_of(right)])])
    if state is State.OPERATOR or any(map(depends_on_input, kwargs.values())):  # alpha, beta, value
        return call.mode.run_frozen(call, addend, left, right, **kwargs)
    value = affine(call, addend, *without_gates((left, right)), **kwargs)
    return mark(value, state if _scales(call) else mixed_state(state))


def fused_quotient(call: Call, addend: Tensor, numerator: Tensor, denominator: Tensor, *, value: Any = 1) -> Any:
    """``addcdiv``: an addend plus a quotient, each by its own rule."""
    with call.mode:
        return addend + value * (numerator / denominator)


def _scales(call: Call, *args: Any) -> bool:
    """Whether a product only scales: no numbers of a factor are added up."""
    if call.name != "einsum" or not isinstance(args[0], str):
        return call.name in SCALINGS
    factors, arrow, result = args[0].replace(" ", "").partition("->")
    return all(letter in result if arrow else factors.count(letter) == 1 for letter in set(factors) - set(",."))


def quotient(call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Division: the denominator is a scale and is frozen."""
    if rounding_mode is not None or not is_carrier(input):
        return call.mode.run_frozen(call, input, other, rounding_mode=rounding_mode)
    return mark(call.func(input, other.detach() if isinstance(other, Tensor) else other), state_of(input))


def power(call: Call, input: Any, exponent: Any = 2) -> Any:
    """An activation raised to a power, such as ReLU squared, is a gate of its own; any other power is a scale."""
    if state_of(input) is not State.GATE or isinstance(exponent, Tensor) or exponent < 1:
        return call.mode.run_frozen(call, input, *([exponent] if call.name == "pow" else []))
    x = input.detach()
    value = x**exponent
    return mark(carry(lambda: value, torch.mul, input, saved=(x ** (exponent - 1),)), State.GATE)


def gated_linear_unit(call: Call, input: Tensor, dim: int = -1) -> Tensor:
    """``F.glu``: a * sigmoid(b), of which b makes the gate."""
    gate = input.detach().chunk(2, dim)[1].sigmoid()
    return carry(
        lambda: call.func(input, dim),
        lambda grad, gate: torch.cat([grad * gate, torch.zeros_like(grad)], dim),
        input,
        saved=(gate,),
    )
