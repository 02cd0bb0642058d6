"""The gamma rule: linear layers prefer what agrees with the sign of their output.

Contributions x_i w_ji to an output z_j count 1 + gamma times where their sign is that of z_j, and relevance is handed
out in proportion. With c = gamma / (2 + gamma) and absolute values |w| this takes two products for one:

    a_j = sum_i |x_i| |w_ji| + |b_j|,    s_j = z_j / (|z_j| + c a_j)
    grad_x = (grad * |s|) W + c sign(x) ((grad * s) |W|)

The flat form replaces |w_ji| in both by the rank-one mean u_j v_i, so that only the mean of a layer's weights is
favoured by sign. Either way all relevance arrives:
sum_i x_i grad_i + sum_j grad_j |s_j| (b_j + c sign(z_j) |b_j|) = sum_j grad_j z_j.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit._internal.schema import Checked, NonNegative
from dave_vit.engine.calls import Call, carry
from dave_vit.engine.rules.products import weighted_sum
from dave_vit.engine.states import depends_on_input, is_carrier

_IN_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_IN_MLP = re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE)
_IN_PATCHES = re.compile(r"patch_?embed", re.IGNORECASE)

Layer = Callable[..., Tensor]
"""``layer(x, weight, bias=None)``: a linear layer or convolution."""


@dataclass(frozen=True)
class Gamma(Checked):
    """Rule by which linear layers prefer what agrees with the sign of their output; gamma 0 is the plain rule.

    Attributes:
        conv: gamma of convolutions, and of a linear layer that embeds patches, which is one.
        linear: gamma of linear layers outside of attention.
        attention: gamma of the projections of attention (queries, keys, values, output).
        flat: use the rank-one mean of the absolute weights instead of each of them.
        plain: the rule with the same forward pass, and with gamma 0.
    """

    plain: ClassVar[Callable[..., Any]] = staticmethod(weighted_sum)
    conv: NonNegative = 0.25
    linear: NonNegative = 0.05
    attention: NonNegative = 0.0
    flat: bool = False

    def __call__(
        self, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute a linear layer or convolution."""
        c = self.favour(call, input, weight, bias)
        if c == 0.0:
            return weighted_sum(call, input, weight, bias, *args, **kwargs)

        def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return call.func(x, weight, bias, *args, **kwargs)  # type: ignore[no-any-return]

        x, absolute = input.detach(), dense(weight).abs()
        if self.flat and sees_all_inputs(call, input, weight):
            absolute = torch.mul(*rank_one_factors(weight))
        value = layer(x, weight, bias)  # z
        share = share_of(value, layer(x.abs(), absolute, None if bias is None else bias.abs()), c)
        pullback = partial(_pull_back, layer=layer, c=c)
        carried = carry(lambda: value, pullback, input, saved=(x.sign(), weight, absolute, share))
        if bias is None:
            return carried
        own = by_output(bias, weight)
        return call.mode.record_constant(carried, lambda: bias_part(own, share, c), call.name)

    def favour(self, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None) -> float:
        """Return c = gamma / (2 + gamma) of one call; 0 where the plain rule serves, as for complex numbers.

        Attention and patch embedding are recognised by the name of the parameter.
        """
        if not is_carrier(input) or depends_on_input(weight) or depends_on_input(bias) or weight.is_complex():
            return 0.0
        gamma = self.conv
        if call.name == "linear":
            name = call.mode.find_parameter_name(weight)
            in_attention = _IN_ATTENTION.search(name) and not _IN_MLP.search(name)
            gamma = self.conv if _IN_PATCHES.search(name) else self.attention if in_attention else self.linear
        return gamma / (2 + gamma)


def sees_all_inputs(call: Call, input: Tensor, weight: Tensor) -> bool:
    """Return whether every output of a layer is made of all inputs: not in groups or transposed convolutions."""
    if call.name == "linear":
        return True
    return call.name in ("conv1d", "conv2d", "conv3d") and input.shape[1 - weight.ndim] == weight.shape[1]


def share_of(value: Tensor, size: Tensor, c: float) -> Tensor:
    """Compute s = z / (|z| + c a) in at least float32; it has the sign of z, and is 0 where there is nothing."""
    z = value.to(working_dtype(value.dtype))
    return (z / (z.abs() + c * size).clamp_min(torch.finfo(z.dtype).tiny)).to(value.dtype)


def bias_part(bias: Tensor, share: Tensor, c: float) -> Tensor:
    """Compute the part of the output that is the bias's: times the derivative it is the bias's relevance."""
    return torch.addcmul(share.abs() * bias, share, bias.abs(), value=c)


def by_output(values: Tensor, weight: Tensor) -> Tensor:
    """Reshape one value an output ``[O]`` so that it broadcasts to the layer's result."""
    return values.reshape(-1, *[1] * (weight.ndim - 2))


def _pull_back(
    grad: Tensor, sign: Tensor, weight: Tensor, absolute: Tensor, share: Tensor, *, layer: Layer, c: float
) -> Tensor:
    share = share.to(grad.dtype)
    favoured = adjoint(layer, grad * share, absolute, sign)
    return adjoint(layer, grad * share.abs(), weight, sign) + c * sign.to(grad.dtype) * favoured


def adjoint(layer: Layer, grad: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """Apply the transpose of a layer, as a linear map of inputs shaped as ``like``, to ``grad``."""
    weight = dense(weight).to(grad.dtype)
    if weight.ndim == 2:
        return grad @ weight
    with torch.enable_grad():
        x = torch.zeros_like(like, dtype=grad.dtype, requires_grad=True)
        return torch.autograd.grad(layer(x, weight), x, grad)[0]


def dense(weight: Tensor) -> Tensor:
    """Return a quantized weight, such as torchao's, in the layer's own type; others as they are."""
    return weight.dequantize() if hasattr(weight, "__tensor_flatten__") else weight


def rank_one_factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return u ``[O, 1, ...]`` and v ``[1, I, ...]``, with u v the rank-one mean of |weight| by rows and columns."""
    weight = dense(weight)
    matrix = weight.flatten(1)  # a norm takes absolute values without keeping them
    of_output = torch.linalg.vector_norm(matrix, 1, 1)
    of_input = torch.linalg.vector_norm(weight, 1, 0, keepdim=True) / len(weight)
    mean = of_output.mean().clamp_min(torch.finfo(weight.dtype).tiny)
    return (of_output / mean).reshape(-1, *[1] * (weight.ndim - 1)), of_input
