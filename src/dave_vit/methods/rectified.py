"""Gradients that pass rectifiers by another rule: guided backpropagation and deconvolution.

A rectifier is f(x) = x * phi(x) with a gate phi. For ReLU the gate is 1 or 0 and both rules are the published ones. For
GELU, SiLU and their kin the same rules act on the gate phi(x) = f(x) / x: guided backpropagation passes positive
gradients through the gate, deconvolution passes positive gradients and ignores the gate. All other functions
keep their ordinary derivative.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dave_vit.engine.calls import Call, RuleSet, carry
from dave_vit.engine.rule_sets import PLAIN
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize

RECTIFIERS = frozenset("relu relu6 leaky_relu gelu silu hardswish mish elu celu selu".split())
_NEAR_ZERO = 1e-6


def guided_gate(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Pass positive gradients through the gate (guided backpropagation)."""
    x = torch.where(input == 0, -_NEAR_ZERO, input).detach()  # f(x) / x has its limit there, which for ReLU is 0
    gate = call.func(x, *args, **kwargs) / x  # phi(x)
    compute = partial(call.func, input.detach(), *args, **kwargs)
    return carry(compute, lambda grad, gate: grad.clamp(min=0) * gate, input, saved=(gate,))


def positive_gradient(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Pass positive gradients whatever the input was (deconvolution)."""
    return carry(lambda: call.func(input.detach(), *args, **kwargs), lambda grad: grad.clamp(min=0), input)


GUIDED = PLAIN.extend("guided backpropagation", dict.fromkeys(RECTIFIERS, guided_gate))
DECONVOLUTION = PLAIN.extend("deconvolution", dict.fromkeys(RECTIFIERS, positive_gradient))


class _Rectified(Method):
    rules: ClassVar[RuleSet]

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        passed = self._gradient(images, target, self.rules)
        if not RECTIFIERS & passed.functions.keys():
            raise UnsupportedOperator(
                f"the model has no rectifier for {self.rules.name} to act on, so the map would be the plain gradient; "
                f"use the method saliency, or a model with one of {', '.join(sorted(RECTIFIERS))}"
            )
        return Explanation(passed.weight, target.resolve(passed.logits).indices)


@METHODS.register("guided_backprop")
class GuidedBackprop(_Rectified):
    """The gradient with rectifiers that pass only positive gradients through their gate.

    For ReLU this is the published method; for GELU and its kin the gate is f(x) / x.
    """

    info = MethodInfo(
        "Gradient whose rectifiers pass positive gradients through their gate only.",
        "Springenberg et al., ICLR 2015 workshop",
        "1 forward, 1 backward",
    )
    rules = GUIDED


@METHODS.register("deconvolution")
class Deconvolution(_Rectified):
    """The gradient with rectifiers that pass all positive gradients, whatever their input is.

    For ReLU this is the published method; GELU and its kin are treated alike.
    """

    info = MethodInfo(
        "Gradient whose rectifiers pass all positive gradients.",
        "Zeiler and Fergus, ECCV 2014",
        "1 forward, 1 backward",
    )
    rules = DECONVOLUTION
