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


_LIMITS = {
    0.0: "relu6 tanhshrink hardshrink softshrink",
    0.5: "gelu silu hardswish",
    1.0: "tanh hardtanh elu celu softsign asinh atan",
    math.tanh(math.log(2.0)): "mish",
    1.0507009873554805: "selu",
}
ACTIVATIONS: dict[str, Rule] = {name: gated(limit) for limit, names in _LIMITS.items() for name in names.split()}
"""Activations with f(0) = 0, by their limit of f(x)/x at x = 0."""
