"""Guided backpropagation and deconvolution: gradients that pass rectifiers by another rule."""

from __future__ import annotations

from torch import Tensor

from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.chunked import OnePass
from dave_vit.rules.sets.rectified import DECONVOLVED, GUIDED, RECTIFIERS


class _Rectified(OnePass):
    def _weigh(self, weight: Tensor, images: Tensor) -> Tensor:
        return weight

    def _check_seen(self, seen: dict[str, int]) -> None:
        if not RECTIFIERS & seen.keys():
            raise UnsupportedOperator(
                f"the model has no rectifier for {self.rules.name} to act on, so the map would be the plain gradient; "
                f"use the method saliency, or a model with one of {', '.join(sorted(RECTIFIERS))}"
            )


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
