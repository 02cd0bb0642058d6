"""Products, quotients, powers, activations: one of the tensors carries on, the others are frozen (see ``states``)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.calls import Call, carry
from dave_vit.engine.rules.linear import affine, freeze
from dave_vit.engine.states import (
    State,
    depends_on_input,
    is_carrier,
    mark,
    mixed_state,
    product_state,
    state_of,
    state_of_product,
    sum_state,
    tensors,
    without_gates,
)


def product(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Products: operators and constants scale or mix the one carrier.

    Of two carriers, an activation's output is the gate and is frozen (SwiGLU, GEGLU, B-cos); without a gate the product
    is a score such as Q K^T, or a square, and can only become an operator.
    """
    state = product_state(map(state_of, tensors((args, kwargs))))
    if state is State.OPERATOR:
        return freeze(call, *args, **kwargs)
    args, kwargs = without_gates((args, kwargs))
    return mark(affine(call, *args, **kwargs), state if _only_scales(call, *args) else mixed_state(state))


def weighted_sum(
    call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Linear layers and convolutions: a product, to which the bias is added."""
    state = sum_state([state_of_product(input, weight), state_of(bias)])
    if state is State.OPERATOR:
        return freeze(call, input, weight, bias, *args, **kwargs)
    return mark(affine(call, *without_gates((input, weight)), bias, *args, **kwargs), mixed_state(state))


def fused_product(call: Call, addend: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> Any:
    """An addend plus a product: attention scores with a mask, scale and shift."""
    state = sum_state([state_of(addend), state_of_product(left, right)])
    if state is State.OPERATOR or any(map(depends_on_input, kwargs.values())):  # alpha, beta, value
        return freeze(call, addend, left, right, **kwargs)
    value = affine(call, addend, *without_gates((left, right)), **kwargs)
    return mark(value, state if call.operator.scales else mixed_state(state))


def fused_quotient(call: Call, addend: Tensor, numerator: Tensor, denominator: Tensor, *, value: Any = 1) -> Any:
    """``addcdiv``: an addend plus a quotient, each by its own rule."""
    with call.mode:
        return addend + value * (numerator / denominator)


def _only_scales(call: Call, *args: Any) -> bool:
    """Return whether a product mixes no numbers of a factor with each other."""
    if call.name != "einsum" or not isinstance(args[0], str):
        return call.operator.scales
    factors, arrow, result = args[0].replace(" ", "").partition("->")
    return all(letter in result if arrow else factors.count(letter) == 1 for letter in set(factors) - set(",."))


def quotient(call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Division: the denominator is a scale and is frozen."""
    if rounding_mode is not None or not is_carrier(input):
        return freeze(call, input, other, rounding_mode=rounding_mode)
    return mark(call.func(input, other.detach() if isinstance(other, Tensor) else other), state_of(input))


@dataclass(frozen=True)
class GateRule:
    """Rule of an activation with f(0) = 0: f(x) = x * phi(x), of which only x carries gradient (appendix A).

    Attributes:
        at_zero: the limit of f(x) / x at x = 0.
    """

    at_zero: float

    def __call__(self, call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the activation; its derivative is the gate."""
        if input.is_complex():
            raise call.mode.refusal(call.name)
        x = input.detach()
        value = call.func(x, *args, **kwargs)
        gate = (value / x).nan_to_num_(nan=self.at_zero)  # 0 / 0 is the one NaN
        return mark(carry(lambda: value, torch.mul, input, saved=(gate,)), State.GATE)


def power(call: Call, input: Any, exponent: Any = 2) -> Any:
    """An activation raised to a power, such as ReLU squared, is a gate of its own; any other power is a scale."""
    if state_of(input) is not State.GATE or isinstance(exponent, Tensor) or exponent < 1:
        return freeze(call, input, *([exponent] if call.name == "pow" else []))
    x = input.detach()
    value = x**exponent
    return mark(carry(lambda: value, torch.mul, input, saved=(x ** (exponent - 1),)), State.GATE)


def gated_linear_unit(call: Call, input: Tensor, dim: int = -1) -> Tensor:
    """``F.glu``: a * sigmoid(b), of which b makes the gate."""

    def pullback(grad: Tensor, gate: Tensor) -> Tensor:
        return torch.cat([grad * gate, torch.zeros_like(grad)], dim)

    gate = input.detach().chunk(2, dim)[1].sigmoid()
    return carry(lambda: call.func(input, dim), pullback, input, saved=(gate,))
