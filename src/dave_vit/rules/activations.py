"""Activations as gates: f(x) = x * phi(x), of which only x carries gradient (appendix A, GELU / Swish)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dave_vit.intercept.calls import Call, Rule
from dave_vit.intercept.states import State, mark
from dave_vit.intercept.surrogate import carry


def gated(at_zero: float) -> Rule:
    """The rule of an activation with f(0) = 0.

    Args:
        at_zero: the limit of f(x)/x at x = 0.
    """

    def rule(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = input.detach()
        value = call.func(x, *args, **kwargs)
        gate = (value / x).nan_to_num_(nan=at_zero)  # phi(x); 0 / 0 is the one NaN
        return mark(carry(lambda: value, torch.mul, input, saved=(gate,)), State.GATE)

    return rule


ACTIVATIONS: dict[str, Rule] = {
    "gelu": gated(0.5),
    "silu": gated(0.5),
    "hardswish": gated(0.5),
    "mish": gated(math.tanh(math.log(2.0))),
    "tanh": gated(1.0),
    "hardtanh": gated(1.0),
    "relu6": gated(0.0),
    "elu": gated(1.0),
    "celu": gated(1.0),
    "selu": gated(1.0507009873554805),
    "softsign": gated(1.0),
    "tanhshrink": gated(0.0),
    "hardshrink": gated(0.0),
    "softshrink": gated(0.0),
    "asinh": gated(1.0),
    "atan": gated(1.0),
}
