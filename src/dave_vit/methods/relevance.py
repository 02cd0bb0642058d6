"""Sums over inputs and biases under a rule set: AttnLRP, CP-LRP and B-cos; FullGrad, OMENN and LibraGrad."""

from collections.abc import Iterable
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal, NoReturn

from torch import Tensor, nn

from dave_vit._internal.schema import NonNegative
from dave_vit.engine import Call, RuleSet, Target, carry
from dave_vit.engine.operators import OPERATORS, OperatorKind, names_of_kind
from dave_vit.engine.rule_sets import ATTN_LRP, CP_LRP, EFFECTIVE, PLAIN, uniform_product, with_gamma
from dave_vit.engine.rules.attention import multi_head_attention
from dave_vit.engine.rules.gamma import Gamma
from dave_vit.engine.rules.linear import affine
from dave_vit.engine.rules.products import product
from dave_vit.engine.states import State, map_tensors, state_of, tensors
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, Method, MethodInfo, check_no_clips, multiply_by_input
from dave_vit.methods.cams import ActivationMap, GradCAM
from dave_vit.methods.constants import CONSTANT_ROWS, Contribution, attributions, scale_to_unit, sum_maps, upsample
from dave_vit.methods.dave import Effective
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize

Biases = Literal["all", "conv"]
Base = Literal["fullgrad", "gradcam", "input_x_gradient"]

_WEIGHTED = names_of_kind(OperatorKind.WEIGHTED)
# Ordinary derivatives that also record the additive constants of layers. Layer and group norms of zero are their bias.
_ADDING = [*_WEIGHTED, "layer_norm", "group_norm", "add", "sub", "rsub", "cat", "stack"]
_RULES: dict[str, RuleSet] = {
    "all": PLAIN.extend(
        "full gradient", {**dict.fromkeys(_ADDING, affine), "multi_head_attention_forward": multi_head_attention}
    ),
    "conv": PLAIN.extend("full gradient of convolutions", dict.fromkeys(_WEIGHTED - {"linear"}, affine)),
}


@METHODS.register("fullgrad")
class FullGrad(Method):
    """Input times gradient plus bias times gradient of every layer.

    Input times gradient, and bias times gradient of every layer, brought to the size of the image and added up. As
    published, each channel of each layer is taken by its absolute value and rescaled to [0, 1] before it is brought to
    the image's size and added, so the map is never negative. What has no place in the image (class tokens, pooled
    features, the head) stays out. With ``rescale=False`` everything keeps its sign and size and what has no place is
    spread evenly: the attribution of a piecewise linear model (ReLU, max-pool, batch norm) then sums to its logit.

    Args:
        model: any module that maps inputs to logits.
        biases: "all" takes every additive constant (convolutions, linear layers, norms, position embeddings); "conv"
            takes convolutions and batch norms only, as the grad-cam package does. In a ViT that is one layer.
        rescale: as published; False gives signed sums.
        options: ``chunk`` (images in one pass; one at a time where the model does not separate its constants by image)
            and ``autocast``.
    """

    info = MethodInfo(paper="Srinivas and Fleuret, NeurIPS 2019", passes="1 forward, 1 backward")
    _why_no_clips = "puts every constant at its place in the image"
    _rows, _kept = CONSTANT_ROWS, "constants"
    biases: Biases = "all"
    rescale: bool = True

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return attributions(self, images, target, scaled_sum if self.rescale else signed_sum, _RULES[self.biases])


def signed_sum(direct: Tensor, parts: Iterable[Contribution]) -> Tensor:
    """Return input and biases times their derivatives, ``[b, C, H, W]``; what has no place is spread evenly."""
    return direct + sum_maps((part.spread(direct.shape[-2:]) for part in parts), direct)


def scaled_sum(direct: Tensor, parts: Iterable[Contribution]) -> Tensor:
    """Return the published sum ``[b, C, H, W]``: absolute values, channels rescaled; what has no place is left out."""
    # Channels are added up before the upsampling, which is linear.
    grids = (scale_to_unit(part.grid.abs()).sum(1) for part in parts if part.grid is not None)
    maps = (upsample(grid.unsqueeze(1), direct.shape[-2:])[:, 0] for grid in grids)
    return scale_to_unit(direct.abs()) + sum_maps(maps, direct)


@METHODS.register("omenn")
class OMENN(Method):
    """Effective transformation times input, plus every bias at the place where it acts; sums to the logit.

    One matrix to explain a network: C = C_w * x + C_b, with sum(C) = logit. With all operators frozen (dynamic
    linearity) the logit is affine in the input. C_w is the effective transformation. C_b holds what each additive
    constant contributes (biases, position embeddings, class and register tokens), at the place where it acts: a value
    of a feature map or token is shared evenly by the pixels of its place and by their channels; what has no place in
    the image (class token, pooled features, windows) by all pixels. Hence

        sum(C) = <W, x> + sum over constants <ds/db, b> = logit

    for every model that the effective transformation covers.

    Args:
        model: any module that maps inputs to logits.
        options: ``chunk`` (images in one pass; one at a time where the model does not separate its constants by image)
            and ``autocast``.
    """

    info = MethodInfo(paper="Wróbel et al., 2024", passes="1 forward, 1 backward", unit="logit")
    _why_no_clips = "puts every constant at its place in the image"
    _rows, _kept = CONSTANT_ROWS, "constants"

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return attributions(self, images, target, signed_sum, EFFECTIVE)


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


@METHODS.register("libragrad")
class LibraGrad(Method):
    """FullGrad, or another gradient method, on derivatives under which every layer is complete.

    FullGrad, Grad-CAM or input times gradient on balanced derivatives. Attention matrices, scales of norms and gates of
    activations are held; of a stream that is multiplied by the activation of another one, both get half of the
    derivative. Value times derivative is then the same sum in every layer, so that with the base "fullgrad" the
    attribution sums to the logit. In a model without gated products "fullgrad" equals ``omenn``, and "input_x_gradient"
    equals ``effective``.

    Args:
        model: any module that maps inputs to logits.
        base: the method that the derivatives are given to: "fullgrad" (signed), "gradcam" or "input_x_gradient".
        options: ``chunk`` (images in one pass; with "fullgrad" one at a time where the model does not separate its
            constants by image) and ``autocast``.
    """

    info = MethodInfo(paper="Mehri et al., CVPR 2025", passes="1 forward, 1 backward")
    _rows, _kept = CONSTANT_ROWS, "constants"
    base: Base = "fullgrad"

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        if self.base == "input_x_gradient":
            return multiply_by_input(self._gradient(images, target, LIBRA), images, target)
        check_no_clips(images, f"libragrad on {self.base}", "puts values at their place in the image")
        if self.base == "gradcam":
            return _LibraCAM(self.model, autocast=self.autocast)._explain(images, target, pass_size)
        return attributions(self, images, target, signed_sum, LIBRA)


class _LibraCAM(ActivationMap):
    _weigh = GradCAM._weigh
    rules = LIBRA.extend("LibraGrad, attention observed", dict.fromkeys(_MATRIX_PRODUCTS, observable_scores))


_LRP_PASSES = "1 forward, 1 backward (with gamma twice the work)"


class _LRP(Method):
    base: ClassVar[RuleSet]
    _: KW_ONLY
    conv_gamma: NonNegative = Gamma.conv
    linear_gamma: NonNegative = Gamma.linear
    attention_gamma: NonNegative = Gamma.attention

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = with_gamma(self.base, Gamma(self.conv_gamma, self.linear_gamma, self.attention_gamma))

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return multiply_by_input(self._gradient(images, target, self.rules), images, target)


@METHODS.register("attn_lrp")
class AttnLRP(_LRP):
    """Relevance propagated back through values, keys and queries, with the gamma rule for linear layers.

    Relevance propagated through values, keys and queries. The defaults of gamma are the recipe of the authors' example
    for vision transformers; 0 everywhere is the method without gamma.

    Args:
        model: any module that maps inputs to logits.
        conv_gamma: gamma of convolutions; 0 is the plain rule.
        linear_gamma: gamma of linear layers outside of attention.
        attention_gamma: gamma of the projections of attention, known by "attn" or "attention" in a module's name.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(paper="Achtibat et al., ICML 2024", passes=_LRP_PASSES, unit="logit")
    base = ATTN_LRP


@METHODS.register("cp_lrp")
class CPLRP(_LRP):
    """Relevance propagated back through values with attention held, with the gamma rule for linear layers.

    Relevance propagated through values only, attention matrices held; arguments as for ``attn_lrp``. With gamma 0
    everywhere it equals the method ``effective``.
    """

    info = MethodInfo(paper="Ali et al., ICML 2022", passes=_LRP_PASSES, unit="logit")
    base = CP_LRP


@METHODS.register("bcos")
class Bcos(Effective):
    """Dynamic linear weights of a B-cos network, times the input.

    A B-cos network is linear once its dynamic weights are held, and holding them is what the effective transformation
    does; so the map equals that of the method ``effective``, and of the network's own explanation mode.

    Args:
        model: a B-cos network.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(paper="Böhle et al., TPAMI 2024", passes="1 forward, 1 backward", unit="logit")

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        if not any(hasattr(module, "set_explanation_mode") for module in model.modules()):
            raise UnsupportedOperator(
                "bcos explains B-cos networks, and this model has no B-cos module; use effective, its generalisation"
            )
