"""LibraGrad: a gradient method on derivatives whose paths are pruned and scaled until every layer is complete."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, get_args

from torch import Tensor, nn

from dave_vit._internal.schema import check_choice
from dave_vit.engine.calls import Call, carry
from dave_vit.engine.observation import observe
from dave_vit.engine.operators import OPERATORS, OperatorKind, names_of_kind
from dave_vit.engine.rule_sets import EFFECTIVE, uniform_product
from dave_vit.engine.rules.products import product
from dave_vit.engine.states import State, map_tensors, state_of, tensors
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, Method, MethodInfo, check_no_clips, multiply_by_input
from dave_vit.methods.bias_placement import CONSTANT_ROWS, attributions
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.fullgrad import signed_sum
from dave_vit.methods.gradcam import mean_slope, weigh_features
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import explain_grids

Base = Literal["fullgrad", "gradcam", "input_x_gradient"]


def halved_product(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Give a stream and the activation it is multiplied by (SwiGLU) half of the derivative each."""
    states = [state_of(factor) for factor in tensors((args, kwargs))]
    gated = states.count(State.CARRIER) == states.count(State.GATE) == 1
    return (uniform_product if gated else product)(call, *args, **kwargs)


def observable_scores(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Let attention scores carry until the softmax freezes them, so that the softmax can be observed."""
    carriers = [factor for factor in tensors((args, kwargs)) if state_of(factor) is State.CARRIER]
    if len(carriers) < 2:
        return halved_product(call, *args, **kwargs)
    args, kwargs = map_tensors(Tensor.detach, (args, kwargs))
    return carry(lambda: call.func(*args, **kwargs), _no_softmax, *carriers)


def _no_softmax(grad: Tensor) -> NoReturn:
    raise UnsupportedOperator(
        "the model multiplies two streams without a softmax after it, which libragrad cannot freeze here; use another "
        "base, such as input_x_gradient, or the method effective"
    )


_PRODUCTS = names_of_kind(OperatorKind.PRODUCT)
_MATRIX_PRODUCTS = [name for name in _PRODUCTS if not OPERATORS[name].scales]

LIBRA = EFFECTIVE.extend("LibraGrad", dict.fromkeys(_PRODUCTS, halved_product))
"""Attention, the scales of norms and the gates of activations are frozen; gated products are halved."""

LIBRA_OBSERVED = LIBRA.extend("LibraGrad, attention observed", dict.fromkeys(_MATRIX_PRODUCTS, observable_scores))
"""``LIBRA`` for passes in which attention is observed."""


@METHODS.register("libragrad")
class LibraGrad(Method):
    """FullGrad, Grad-CAM or input times gradient on balanced derivatives.

    Attention matrices, scales of norms and gates of activations are held; of a stream that is multiplied by the
    activation of another one, both get half of the derivative. Value times derivative is then the same sum in every
    layer, so that with the base "fullgrad" the attribution sums to the logit. In a model without gated products
    "fullgrad" equals ``omenn``, and "input_x_gradient" equals ``effective``.

    Args:
        model: any module that maps inputs to logits.
        base: the method that the derivatives are given to: "fullgrad" (signed), "gradcam" or "input_x_gradient".
        options: ``chunk`` (images in one pass; with "fullgrad" one at a time where the model does not separate its
            constants by image) and ``autocast``.
    """

    info = MethodInfo(
        "FullGrad, or another gradient method, on derivatives under which every layer is complete.",
        "Mehri et al., CVPR 2025",
        "1 forward, 1 backward",
    )
    _rows, _kept = CONSTANT_ROWS, "constants"

    def __init__(self, model: nn.Module, *, base: Base = "fullgrad", **options: Any) -> None:
        super().__init__(model, **options)
        self.base: Base = check_choice("base", base, get_args(Base))

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        if self.base == "input_x_gradient":
            return multiply_by_input(self._gradient(images, target, LIBRA), images, target)
        check_no_clips(images, f"libragrad on {self.base}", "puts values at their place in the image")
        if self.base == "gradcam":
            return self._activation_map(images, target)
        return attributions(self, images, target, signed_sum, LIBRA)

    def _activation_map(self, images: Tensor, target: Target) -> Explanation:
        with observe(self.model, images, rules=LIBRA_OBSERVED, autocast=self.autocast, read=target.read) as observed:
            target = target.resolve(observed.logits)
            grids = weigh_features(observed, images, target.scores(observed.logits), mean_slope)
            return explain_grids(grids.clamp(min=0), images, target)
