"""Layer-wise relevance propagation through attention: AttnLRP and CP-LRP as rule sets.

Relevance is the product of a value and its derivative, so that every propagation rule is a changed derivative. Both
methods propagate through norms and activations by the identity rule, which is what the effective transformation does;
CP-LRP also holds the attention matrices, so that without gamma it *is* the effective transformation. AttnLRP lets
relevance through the matrices: by the Taylor rule through softmax, whose derivative is the ordinary one, and by the
uniform rule through products of two input-dependent tensors, which get half of the relevance each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dave_vit.errors import OptionError
from dave_vit.intercept.calls import Call, RuleSet
from dave_vit.intercept.names import FUSED_PRODUCTS, PRODUCTS, WEIGHTED
from dave_vit.intercept.states import is_carrier, is_operator, map_tensors, tensors
from dave_vit.intercept.surrogate import carry
from dave_vit.precision import working_dtype
from dave_vit.rules.attention import FusedAttention
from dave_vit.rules.linear import ordinary
from dave_vit.rules.products import fused_product, product, weighted
from dave_vit.rules.sets.effective import EFFECTIVE

_IN_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_IN_MLP = re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE)


def _scaled(tensor: Tensor, share: float) -> Tensor:
    """The same value with its derivative times ``share``."""
    return carry(tensor.clone, lambda grad: grad * share, tensor) if tensor.requires_grad else tensor


def uniform_product(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Products: two input-dependent factors share the relevance (the uniform rule)."""
    carriers = [t for t in tensors((args, kwargs)) if t.requires_grad]
    if len(carriers) < 2:
        return product(call, *args, **kwargs)
    share = 1.0 / len(carriers)
    args, kwargs = map_tensors(lambda t: _scaled(t, share), (args, kwargs))
    return call.func(*args, **kwargs)


def uniform_fused_product(call: Call, addend: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> Any:
    """An addend plus a product, such as masked attention scores."""
    if is_operator(addend) or not (is_carrier(left) and is_carrier(right)):
        return fused_product(call, addend, left, right, **kwargs)
    return call.func(addend, _scaled(left, 0.5), _scaled(right, 0.5), **kwargs)


def attention(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Fused attention: V and the matrix take half of the relevance each, Q and K half of the matrix's each."""
    given = FusedAttention.of(call, *args, **kwargs)
    query, key = _scaled(given.query, 0.25), _scaled(given.key, 0.25)
    return replace(given, query=query, key=key, value=_scaled(given.value, 0.5)).mixed(call)


@dataclass(frozen=True)
class Gamma:
    """How much linear layers prefer what agrees with the sign of their output; 0 is the plain rule.

    Attributes:
        conv: for convolutions.
        linear: for linear layers outside of attention.
        attention: for the projections of attention (queries, keys, values, output).
    """

    conv: float = 0.25
    linear: float = 0.05
    attention: float = 0.0

    def __post_init__(self) -> None:
        for name in ("conv", "linear", "attention"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"gamma for {name} is {getattr(self, name)}; give a finite number, 0 or above")

    def of(self, call: Call) -> float:
        """The gamma of one call; attention is told by the name of the module."""
        if call.name != "linear":
            return self.conv
        if self.linear == self.attention:
            return self.linear
        where = call.mode.where()
        return self.attention if _IN_ATTENTION.search(where) and not _IN_MLP.search(where) else self.linear

    def rule(
        self, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Linear layers and convolutions."""
        gamma = self.of(call) if is_carrier(input) and not (is_carrier(weight) or is_operator(weight)) else 0.0
        if gamma == 0.0:
            return weighted(call, input, weight, bias, *args, **kwargs)

        def layer(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            return call.func(x, w, b, *args, **kwargs)  # type: ignore[no-any-return]

        x = input.detach()
        value = layer(x, weight, bias)
        share = _share(layer, gamma, x, weight, bias, value)
        back = torch.matmul if call.name == "linear" else partial(_transposed, layer, x.shape)
        return carry(lambda: value, partial(_favoured, back, gamma), input, saved=(share, x > 0, weight))


def _share(
    layer: Callable[..., Tensor], gamma: float, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor
) -> Tensor:
    """z / (z + gamma * contributions of the sign of z) for the output z, with the sign of z.

    The denominator is never smaller in size than z, hence no stabiliser.
    """
    rise, fall = weight.clamp(min=0), weight.clamp(max=0)
    up = layer(x.clamp(min=0), rise, None if bias is None else bias.clamp(min=0)) + layer(x.clamp(max=0), fall)
    z, up = (tensor.to(working_dtype(value.dtype)) for tensor in (value, up))
    agreeing = torch.where(z > 0, up, z - up)
    return torch.where(z == 0, 0.0, z.abs() / (z + gamma * agreeing))


def _favoured(
    back: Callable[[Tensor, Tensor], Tensor], gamma: float, grad: Tensor, share: Tensor, rising: Tensor, weight: Tensor
) -> Tensor:
    """The gamma rule: contributions that agree with the sign of the output z count 1 + gamma times.

    Relevance z * grad goes to the inputs in proportion to these contributions.
    """
    weight = weight.to(grad.dtype)
    positive, negative = (grad * part.to(grad.dtype) for part in (share.clamp(min=0), -share.clamp(max=0)))
    plain = back(positive + negative, weight)
    lifted = back(positive, weight.clamp(min=0)) + back(negative, weight.clamp(max=0))  # through positive inputs
    return plain + gamma * torch.where(rising, lifted, plain - lifted)


def _transposed(layer: Callable[..., Tensor], shape: torch.Size, grad: Tensor, weight: Tensor) -> Tensor:
    with torch.enable_grad():
        at = torch.zeros(shape, dtype=grad.dtype, device=grad.device, requires_grad=True)
        return torch.autograd.grad(layer(at, weight), at, grad)[0]


ATTN_LRP = EFFECTIVE.extend(
    "AttnLRP",
    {
        **dict.fromkeys(PRODUCTS, uniform_product),
        **dict.fromkeys(FUSED_PRODUCTS, uniform_fused_product),
        "scaled_dot_product_attention": attention,
        # By its first-order Taylor expansion: R_i = x_i (R_i - s_i sum_j R_j), the ordinary derivative.
        **dict.fromkeys(["softmax", "_softmax"], ordinary),
    },
)
"""Relevance through values, keys and queries."""

CP_LRP = EFFECTIVE.extend("CP-LRP", {})
"""Relevance through values only."""


def with_gamma(base: RuleSet, gamma: Gamma) -> RuleSet:
    """The same rules with the gamma rule for linear layers and convolutions."""
    return base.extend(base.name, dict.fromkeys(WEIGHTED, gamma.rule))
