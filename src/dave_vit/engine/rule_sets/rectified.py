"""Gradients that pass rectifiers by another rule: guided backpropagation and deconvolution.

A rectifier is f(x) = x * phi(x) with a gate phi. For ReLU the gate is 1 or 0 and both rules are the published ones. For
GELU, SiLU and their kin the same rules act on the gate phi(x) = f(x) / x: guided backpropagation lets positive
gradients through the gate, deconvolution lets positive gradients pass and leaves the gate away. All other functions
keep their ordinary derivative.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.calls import Call
from dave_vit.engine.rule_sets.plain import PLAIN
from dave_vit.engine.surrogate import carry

RECTIFIERS = frozenset("relu relu6 leaky_relu gelu silu hardswish mish elu celu selu".split())
_NEAR_ZERO = 1e-6


def guided(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Positive gradients, through the gate."""
    x = torch.where(input == 0, -_NEAR_ZERO, input).detach()  # f(x) / x has its limit there, which for ReLU is 0
    gate = call.func(x, *args, **kwargs) / x  # phi(x)
    compute = partial(call.func, input.detach(), *args, **kwargs)
    return carry(compute, lambda grad, gate: grad.clamp(min=0) * gate, input, saved=(gate,))


def deconvolved(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Positive gradients, whatever the input was."""
    return carry(lambda: call.func(input.detach(), *args, **kwargs), lambda grad: grad.clamp(min=0), input)


GUIDED = PLAIN.extend("guided backpropagation", dict.fromkeys(RECTIFIERS, guided))
DECONVOLVED = PLAIN.extend("deconvolution", dict.fromkeys(RECTIFIERS, deconvolved))
