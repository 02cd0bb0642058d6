"""Gates of GELU and SiLU in closed form: recomputed from the input on the way back instead of kept."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.calls import Call, carry
from dave_vit.engine.fast import PassKind, kernels, register_substitute
from dave_vit.engine.rules.products import GateRule
from dave_vit.engine.states import State, mark

_SIGNS = "_dave_signs"
_HALVES = (torch.bfloat16, torch.float16)
# Fitted to the tail times exp(x^2 / 2) for x from 0 to 13, by powers of 1 / (1 + 0.34 x), the highest first.
_TAIL = (0.0435957057, -0.195032412, 0.254137268, -0.0214602158, 0.151934578, 0.130911955, 0.13591313)


def gelu_gate(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute the gate of GELU, or of its approximation."""
    if approximate == "tanh":
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return _normal_cdf(x.float()) if x.dtype in _HALVES else 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _normal_cdf(x: Tensor) -> Tensor:
    """Compute the normal distribution function in float32: to 4e-7, and to 2e-5 of it in the tail.

    Half types cannot be told from the exact one. With ``erf``, a GPU computes for longer than it reads, and a quotient
    and ``exp`` are still longer than they look: together ten instructions more than ``rsqrt`` and ``exp2``.
    """
    root = torch.rsqrt(1 + 0.34 * x.abs())
    t = root * root
    series = _TAIL[0] * t
    for coefficient in _TAIL[1:]:
        series = (series + coefficient) * t
    tail = series * torch.exp2(x * x * (-0.5 / math.log(2)))
    return torch.where(x > 0, 1 - tail, tail)


_GATES: dict[str, Callable[..., Tensor]] = {"gelu": gelu_gate, "silu": lambda x, **options: torch.sigmoid(x)}


@register_substitute(GateRule, passes=(PassKind.TRACED,))
def closed_gate(plain: GateRule, call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Recompute the gate in the kernel that multiplies by it, or a compiler's; the input must not be written to."""
    if call.name not in _GATES:
        return NotImplemented
    x, kind = input.detach(), "tanh" if "tanh" in (*args, *kwargs.values()) else call.name
    if kind == "gelu" and x.dtype in _HALVES and not kernel_takes(x):
        value = (x * gelu_gate(x)).to(x.dtype)  # compilers compute GELU of half types through ``erf``
    else:
        value = call.func(x, *args, **kwargs)

    def pullback(grad: Tensor, x: Tensor) -> Tensor:
        if kernel_takes(grad, x):
            return kernels.load().gate_gradient(grad, x, kind=kind, at_zero=plain.at_zero)  # type: ignore[no-any-return]
        return grad * torch.where(x == 0, plain.at_zero, _GATES[call.name](x, *args, **kwargs))

    result = mark(carry(lambda: value, pullback, input, saved=(x,)), State.GATE)
    setattr(result, _SIGNS, x)  # which is kept anyway
    return result


@register_substitute(GateRule, passes=(PassKind.RECORDED,))
def gate_by_kernel(plain: GateRule, call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Recompute the gate where the kernel takes the input."""
    return closed_gate(plain, call, input, *args, **kwargs) if kernel_takes(input) else NotImplemented


def kernel_takes(*tensors: Tensor) -> bool:
    """Return whether the kernel takes these tensors."""
    return all(one.is_contiguous() for one in tensors) and kernels.take(*tensors)


def same_signs(value: Tensor) -> Tensor:
    """Return a tensor with the signs of this one; only for passes in which nothing is written in place."""
    signs: Tensor = getattr(value, _SIGNS, value)
    return signs.detach()
