"""Attention weighted by what it contributes to the class: the two methods of Chefer, Gur and Wolf.

Alpha-beta relevance (CVPR 2021) is a rule set: the "gradient" that autograd passes to a rule is the relevance of the
function's result, and the rule returns the relevance of its arguments. Where a tensor is used twice autograd adds up,
as relevance does. Biases of linear layers get no share; a constant that is added, such as a position embedding, does.
All of it is computed in float64 where the device has it: relevance is divided by sums that nearly cancel, so that in
float32 whole maps can come out differently.

A closure passed to autograd must not reference the call: the call references the interception, which references what
it has observed, so the graph would reference itself in a cycle that the garbage collector cannot see.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit._internal.schema import Bounds
from dave_vit.engine.calls import Call, Rule, RuleSet, carry
from dave_vit.engine.observation import Observation, observe
from dave_vit.engine.operators import OperatorKind, names_of_kind
from dave_vit.engine.rules import linear
from dave_vit.engine.states import is_carrier, map_tensors, tensors
from dave_vit.engine.targets import Target
from dave_vit.methods.attention import from_layer
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.tokens import TokenGraph, TokenMethod, gradients, token_graph

_TINY = 1e-9  # keeps quotients finite, as in the authors' code

_CASTS = frozenset("to type float double half bfloat16 type_as".split())
_RECTIFIERS = frozenset("relu leaky_relu prelu rrelu abs".split())
_SCALES = frozenset("relu leaky_relu prelu softmax _softmax div pow square".split())
# Each element keeps its relevance.
_JOINS = frozenset("cat stack hstack vstack dstack pad where masked_fill".split())


def _share(relevance: Tensor, total: Tensor) -> Tensor:
    """Return relevance per unit of ``total``; zero where the total is zero."""
    return torch.where(total == 0, 0, relevance / (total + _TINY))


def pass_on(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Pass relevance on unchanged, for activations, norms, softmax and scale factors."""
    if not is_carrier(input):
        return linear.freeze(call, input, *args, **kwargs)  # type: ignore[no-any-return]
    args, kwargs = map_tensors(Tensor.detach, (args, kwargs))
    value, shape = partial(call.func, input.detach(), *args, **kwargs), input.shape
    return carry(value, lambda relevance: relevance.sum_to_size(shape), input)


def divide_among(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Divide relevance in proportion to the contribution of each element, for sums, means and maxima."""
    x, func = input.detach(), call.func
    value = func(x, *args, **kwargs)
    if not isinstance(value, Tensor):
        raise call.mode.refusal(call.name, "it returns more than one tensor")

    def pullback(relevance: Tensor, x: Tensor) -> Tensor:
        return _divide_relevance(lambda x: func(x, *args, **kwargs), relevance, x)[0]

    return carry(lambda: value, pullback, input, saved=(x,))


def _divide_relevance(function: Callable[..., Tensor], relevance: Tensor, *arguments: Tensor) -> list[Tensor]:
    """Return x * J^T (R / f(x)) for each argument x of a linear function f."""
    with torch.enable_grad():
        leaves = [argument.detach().requires_grad_() for argument in arguments]
        total = function(*leaves)
    pulled = torch.autograd.grad(total, leaves, _share(relevance, total.detach()))
    return [leaf.detach() * part for leaf, part in zip(leaves, pulled, strict=True)]


def keep_precision(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Keep the precision of relevance in casts; they only move it to another device."""
    probe = call.func(input.detach().new_empty(0), *args, **kwargs)
    if not probe.is_floating_point():
        return linear.freeze(call, input, *args, **kwargs)  # type: ignore[no-any-return]
    return input.to(probe.device)


def add(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """Divide relevance elementwise by each term, and the terms' totals by their absolute values."""
    terms = (torch.as_tensor(input), torch.as_tensor(other))

    def pullback(relevance: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        ratio = _share(relevance, saved[0] + saved[1])
        parts = [torch.where(term.isfinite(), term * ratio, 0) for term in saved]  # a mask is not finite
        sums = [part.sum() for part in parts]
        totals = [_share(amount.abs(), sums[0].abs() + sums[1].abs()) * relevance.sum() for amount in sums]
        scaled = [p * _share(t, amount) for p, t, amount in zip(parts, totals, sums, strict=True)]
        return tuple(p.sum_to_size(t.shape) for p, t in zip(scaled, terms, strict=True) if is_carrier(t))

    saved = (terms[0].detach(), terms[1].detach() * alpha)
    return carry(lambda: saved[0] + saved[1], pullback, *filter(is_carrier, terms), saved=saved)


def subtract(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """Divide relevance as for a sum with one sign changed."""
    return add(call, input, other, alpha=-alpha)


def multiply(call: Call, input: Any, other: Any) -> Tensor:
    """Give half to each of two factors that depend on the input; a constant factor gets nothing."""
    carriers = [factor for factor in (input, other) if is_carrier(factor)]
    values = [factor.detach() if isinstance(factor, Tensor) else factor for factor in (input, other)]

    def pullback(relevance: Tensor) -> tuple[Tensor, ...]:
        return tuple(relevance.sum_to_size(factor.shape) / len(carriers) for factor in carriers)

    return carry(lambda: call.func(*values), pullback, *carriers)


def matrix_product(call: Call, *args: Any, alpha: float, **kwargs: Any) -> Tensor:
    """Give half to each of two factors that depend on the input; with a constant factor it is a linear layer."""
    factors = list(tensors((args, kwargs)))
    carriers = [factor for factor in factors if is_carrier(factor)]
    func = call.func

    def product(*values: Tensor) -> Tensor:
        replaced = {id(factor): value for factor, value in zip(factors, values, strict=True)}
        changed = map_tensors(lambda tensor: replaced[id(tensor)], (args, kwargs))
        return func(*changed[0], **changed[1])  # type: ignore[no-any-return]

    def pullback(relevance: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        if len(carriers) == 2:
            return tuple(part / 2 for part in _divide_relevance(product, relevance, *saved))
        at = 0 if is_carrier(factors[0]) else 1
        ordered = product if at == 0 else lambda x, weight: product(weight, x)
        return (_alpha_beta(ordered, relevance, saved[at], saved[1 - at], alpha),)

    if len(factors) != 2 or factors[0] is factors[1]:
        raise call.mode.refusal(call.name, "it is no product of two different tensors")
    saved = tuple(factor.detach() for factor in factors)
    return carry(lambda: product(*saved), pullback, *carriers, saved=saved)


def alpha_beta_linear(
    call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, alpha: float, **kwargs: Any
) -> Tensor:
    """Apply the alpha-beta rule to a linear layer or a convolution."""
    if is_carrier(weight):
        raise call.mode.refusal(call.name, "its weight depends on the input")
    func = call.func

    def pullback(relevance: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _alpha_beta(lambda x, weight: func(x, weight, None, *args, **kwargs), relevance, x, weight, alpha)

    x = input.detach()
    return carry(lambda: call.func(x, weight, bias, *args, **kwargs), pullback, input, saved=(x, weight))


def _alpha_beta(
    product: Callable[[Tensor, Tensor], Tensor], relevance: Tensor, x: Tensor, weight: Tensor, alpha: float
) -> Tensor:
    """Return alpha times the share of positive contributions x_i w_ij minus (alpha - 1) times that of negative ones."""
    positive, negative = weight.clamp(min=0), weight.clamp(max=0)

    def of_one_sign(first: Tensor, second: Tensor) -> Tensor:
        halves = x.clamp(min=0), x.clamp(max=0)
        return sum(_divide_relevance(lambda p, n: product(p, first) + product(n, second), relevance, *halves))  # type: ignore[return-value]

    active = alpha * of_one_sign(positive, negative)
    return active if alpha == 1 else active - (alpha - 1) * of_one_sign(negative, positive)


def gated_linear_unit(call: Call, input: Tensor, dim: int = -1) -> Tensor:
    """Run ``F.glu`` as its parts."""
    with call.mode:
        value, gate = input.chunk(2, dim)
        return value * gate.sigmoid()


def _wide(rule: Rule) -> Rule:
    """Return the rule applied to arguments in the widest type of their device."""

    def widen(tensor: Tensor) -> Tensor:
        return tensor.to(precise_dtype(tensor.device)) if tensor.is_floating_point() else tensor

    return lambda call, *args, **kwargs: rule(call, *map_tensors(widen, args), **map_tensors(widen, kwargs))


_PLAIN_RULES: dict[str, Rule] = {
    **dict.fromkeys([*names_of_kind(OperatorKind.FROZEN), "abs"], linear.freeze),
    **dict.fromkeys([*names_of_kind(OperatorKind.MOVE), "affine_grid"], linear.move),
    **dict.fromkeys(names_of_kind(OperatorKind.REDUCTION, OperatorKind.SELECTION) - _RECTIFIERS, divide_among),
    **dict.fromkeys(names_of_kind(OperatorKind.ACTIVATION, OperatorKind.NORM) | _SCALES, pass_on),
    **dict.fromkeys(_CASTS, keep_precision),
    **dict.fromkeys(_JOINS, linear.ordinary),
    "neg": divide_among,
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "glu": gated_linear_unit,
    "dropout": linear.dropout,
    "copy": linear.copy_into,
    "__iter__": linear.iterate,
}


def alpha_beta(alpha: float = 1.0) -> RuleSet:
    """Return the rule set under which derivatives are relevances.

    Args:
        alpha: weight of positive contributions; those against the class weigh ``alpha - 1``.
    """
    weighted: dict[str, Rule] = {
        **dict.fromkeys(names_of_kind(OperatorKind.PRODUCT), partial(matrix_product, alpha=alpha)),
        **dict.fromkeys(names_of_kind(OperatorKind.WEIGHTED), partial(alpha_beta_linear, alpha=alpha)),
    }
    wide = {name: _wide(rule) for name, rule in (weighted | _PLAIN_RULES).items()}
    return RuleSet("alpha-beta relevance", {**wide, "__setitem__": linear.ordinary})


def _relevance(graph: TokenGraph, slopes: Sequence[Tensor], values: Sequence[Tensor], start_layer: int) -> Tensor:
    """Return one value per token, ``[b, N]``."""
    parts = zip(slopes, values, strict=True)
    means = [(slope.to(value.dtype) * value).clamp(min=0).mean(1) for slope, value in parts]  # E_h (dA * A)^+
    layers = from_layer(means[: len(graph.layers)], start_layer)
    pooled = means[len(graph.layers) :]
    start = pooled[0].mean(1, keepdim=True) if pooled else graph.readout().to(layers[0].dtype)  # [b, 1, N]
    gained = torch.zeros_like(start)
    for layer in reversed(layers):
        gained = gained + (start + gained) @ layer  # the read-out's row of (I + A_L) ... (I + A_1), less I
    return (start + gained if pooled else gained)[:, 0]  # what a token is to itself says nothing


def _relevance_grids(graph: TokenGraph, target: Target, values: Sequence[Sequence[Tensor]], start_layer: int) -> Tensor:
    """Return token grids ``[b, K, h, w]`` from K lists, one per class: by what each matrix's gradient is multiplied."""
    slopes = gradients(graph.logits, target, [attention.matrix for attention in graph.all])
    columns = zip(slopes, values, strict=True)
    return graph.layout.to_grid(torch.stack([_relevance(graph, *each, start_layer) for each in columns], 1))


@METHODS.register("chefer_generic")
class CheferGeneric(TokenMethod):
    """Attention times its gradient, gathered over all layers.

    Attention times its gradient, accumulated over all layers: R = R + E_h (dA * A)^+ R.

    Args:
        model: a model with softmax attention among all tokens.
        start_layer: the first block that counts.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(paper="Chefer et al., ICCV 2021", passes="1 forward, 1 backward")

    start_layer: int = 0

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        graph = token_graph(observed, images)
        values = [each.matrix.detach() for each in graph.all]
        return _relevance_grids(graph, target, [values] * target.count, self.start_layer)


@METHODS.register("chefer_lrp")
class CheferLRP(TokenMethod):
    """Relevance of attention matrices times their gradient, gathered over all layers.

    Transformer attribution: relevance of the attention matrices times their gradient, accumulated over all layers.
    Relevance is propagated back through the whole model by the alpha-beta rule, image by image and in float64 whatever
    the model's type is: in float32 it is ill-conditioned, and maps can differ visibly from one machine to the next.
    Autocast applies to the gradient only. Of a class against others the relevance is that of the class by itself: sums
    share relevance out by its total, which is zero for a difference of logits.

    Args:
        model: a model with softmax attention among all tokens.
        start_layer: the first block that counts.
        alpha: weight of positive contributions in linear layers; negative ones weigh ``alpha - 1``.
        options: ``resolution``, ``chunk`` and ``autocast``, as for every method on tokens.
    """

    info = MethodInfo(paper="Chefer et al., CVPR 2021", passes="2 forward, 2 backward")

    start_layer: int = 0
    alpha: Annotated[float, Bounds(at_least=1)] = 1.0

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        graph, alone = token_graph(observed, images), target.without_contrast()
        # One by one: sums share their relevance out by totals over the whole image.
        single = [self._relevances(image, alone.part(i, i + 1)) for i, image in enumerate(images.split(1))]
        values = [[torch.cat(layer) for layer in zip(*column, strict=True)] for column in zip(*single, strict=True)]
        return _relevance_grids(graph, target, values, self.start_layer)

    def _relevances(self, image: Tensor, target: Target) -> Sequence[Sequence[Tensor]]:
        """Return K lists, one per class: the relevance of each attention matrix of one image."""
        exact = image.to(precise_dtype(image.device))
        with observe(self.model, exact, rules=alpha_beta(self.alpha), read=target.read) as observed:
            return gradients(observed.logits, target, [attention.matrix for attention in observed.attention])
