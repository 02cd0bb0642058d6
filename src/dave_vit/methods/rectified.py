"""Guided backpropagation and deconvolution: gradients that pass rectifiers by another rule."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.rule_sets.rectified import DECONVOLVED, GUIDED, RECTIFIERS
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, Explanation, Method, MethodInfo
from dave_vit.methods.pass_size import Passes


class _Rectified(Method):
    rules: ClassVar[RuleSet]

    def _explain(self, images: Tensor, target: Target, passes: Passes) -> Explanation:
        passed = self._gradient(images, target, self.rules)
        if not RECTIFIERS & passed.functions.keys():
            raise UnsupportedOperator(
                f"the model has no rectifier for {self.rules.name} to act on, so the map would be the plain gradient; "
                f"use the method saliency, or a model with one of {', '.join(sorted(RECTIFIERS))}"
            )
        return Explanation(passed.weight, target.resolve(passed.logits).indices)


@METHODS.register("guided_backprop")
class GuidedBackprop(_Rectified):
    """The gradient in which rectifiers let positive gradients through their gate only.

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
    """The gradient in which rectifiers let positive gradients pass, whatever their input was.

    For ReLU this is the published method; GELU and its kin are treated alike.
    """

    info = MethodInfo(
        "Gradient whose rectifiers pass all positive gradients.",
        "Zeiler and Fergus, ECCV 2014",
        "1 forward, 1 backward",
    )
    rules = DECONVOLVED
