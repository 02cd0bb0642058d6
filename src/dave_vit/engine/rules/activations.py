"""Activations as gates: f(x) = x * phi(x), of which only x carries gradient (appendix A, GELU / Swish)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.calls import Call, Rule
from dave_vit.engine.fast.kernels import gates
from dave_vit.engine.states import State, mark, with_signs_of
from dave_vit.engine.surrogate import carry

_HALVES = (torch.bfloat16, torch.float16)
# Fitted to the tail times exp(x^2 / 2) for x from 0 to 13, by powers of 1 / (1 + 0.34 x), the highest first.
_TAIL = (0.0435957057, -0.195032412, 0.254137268, -0.0214602158, 0.151934578, 0.130911955, 0.13591313)


def gated(at_zero: float, gate: Callable[..., Tensor] | None = None) -> Rule:
    """The rule of an activation with f(0) = 0.

    Args:
        at_zero: the limit of f(x)/x at x = 0.
        gate: phi in closed form, which a compiler computes again on the way back rather than keep it.
    """

    def rule(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = input.detach()
        value = _value(call, gate, x, *args, **kwargs)
        traced = call.mode.traced
        # The gate is made again out of x where that is quicker, if the model does not write over x later.
        if gate is not None and (traced or (not call.mode.writes and gates.applicable(x))):

            def pullback(grad: Tensor, x: Tensor) -> Tensor:
                if not traced and gates.applicable(grad, x):
                    return gates.gate_gradient(grad, x, kind=_kind(gate, *args, **kwargs), at_zero=at_zero)
                return grad * torch.where(x == 0, at_zero, gate(x, *args, **kwargs))

            carried = carry(lambda: value, pullback, input, saved=(x,))
            return with_signs_of(mark(carried, State.GATE), x)
        phi = (value / x).nan_to_num_(nan=at_zero)  # 0 / 0 is the one NaN
        return mark(carry(lambda: value, torch.mul, input, saved=(phi,)), State.GATE)

    return rule


def _value(call: Call, gate: Callable[..., Tensor] | None, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What the activation returns; compilers compute GELU of half types through ``erf``, see ``_normal_cdf``."""
    if call.mode.traced and gate is gelu_gate and x.dtype in _HALVES and _kind(gate, *args, **kwargs) == "gelu":
        return (x * gelu_gate(x)).to(x.dtype)
    return call.func(x, *args, **kwargs)  # type: ignore[no-any-return]


def gelu_gate(x: Tensor, approximate: str = "none") -> Tensor:
    """Of GELU and of its approximation."""
    if approximate == "tanh":
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return _normal_cdf(x.float()) if x.dtype in _HALVES else 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _normal_cdf(x: Tensor) -> Tensor:
    """The share of a normal distribution below x, in float32: to 4e-7, and to 2e-5 of it in the tail.

    Half types do not tell it from the exact one. With ``erf``, a GPU computes for longer than it reads, and a quotient
    and ``exp`` are still longer than they look: together ten instructions more than ``rsqrt`` and ``exp2``.
    """
    root = torch.rsqrt(1 + 0.34 * x.abs())
    t = root * root
    series = _TAIL[0] * t
    for coefficient in _TAIL[1:]:
        series = (series + coefficient) * t
    tail = series * torch.exp2(x * x * (-0.5 / math.log(2)))
    return torch.where(x > 0, 1 - tail, tail)


def _kind(gate: Callable[..., Tensor], approximate: str = "none", **options: Any) -> str:
    """The gate's name among the kernels."""
    return "silu" if gate is silu_gate else "tanh" if approximate == "tanh" else "gelu"


def silu_gate(x: Tensor, **options: Any) -> Tensor:
    """Of SiLU; whether it was to write in place does not matter."""
    return torch.sigmoid(x)


_LIMITS = {
    0.0: "relu6 tanhshrink hardshrink softshrink",
    0.5: "gelu silu hardswish",
    1.0: "tanh hardtanh elu celu softsign asinh atan",
    math.tanh(math.log(2.0)): "mish",
    1.0507009873554805: "selu",
}
_GATES: dict[str, Callable[..., Tensor]] = {"gelu": gelu_gate, "silu": silu_gate}
ACTIVATIONS: dict[str, Rule] = {
    name: gated(limit, _GATES.get(name)) for limit, names in _LIMITS.items() for name in names.split()
}
"""Activations with f(0) = 0, by their limit of f(x)/x at x = 0."""
