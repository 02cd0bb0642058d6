"""Rule sets: which rule each torch function meets.

The effective transformation (METHOD: eq. (3), appendix A) freezes every operator. Relevance is the product of a value
and its derivative, so that layer-wise relevance propagation is a rule set too. AttnLRP and CP-LRP propagate through
norms and activations by the identity rule, which is what the effective transformation does; CP-LRP also freezes the
attention matrices, so that without gamma it *is* the effective transformation. AttnLRP lets relevance through the
matrices: by the Taylor rule through softmax, whose derivative is the ordinary one, and by the uniform rule through
products of two input-dependent tensors, which get half of the relevance each.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from dave_vit.engine.calls import Call, RuleSet, carry
from dave_vit.engine.operators import OPERATORS, OperatorKind, names_of_kind
from dave_vit.engine.rules import norms
from dave_vit.engine.rules.attention import AttentionArguments
from dave_vit.engine.rules.gamma import Gamma
from dave_vit.engine.rules.linear import ordinary
from dave_vit.engine.rules.products import GateRule, fused_product, product
from dave_vit.engine.states import is_carrier, is_operator, map_tensors, tensors

EFFECTIVE = RuleSet("effective", {name: entry.rule for name, entry in OPERATORS.items() if entry.rule is not None})
"""Every operator frozen: DAVE's effective transformation."""

OFFICIAL_GATE = EFFECTIVE.extend("effective, GELU gate 1 at zero", {"gelu": GateRule(1.0)})
"""As the authors' public code has it: the GELU gate at x = 0 is 1 instead of its limit 0.5."""


PLAIN = RuleSet("plain", {"batch_norm": norms.batch_norm}, strict=False)
"""Nothing frozen; batch normalisation has its derivative written out (see there)."""


def _scale_gradient(tensor: Tensor, share: float) -> Tensor:
    """Return the same value with its derivative times ``share``."""
    return carry(tensor.clone, lambda grad: grad * share, tensor) if tensor.requires_grad else tensor


def uniform_product(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Products: two input-dependent factors share the relevance (the uniform rule)."""
    carriers = [t for t in tensors((args, kwargs)) if t.requires_grad]
    if len(carriers) < 2:
        return product(call, *args, **kwargs)
    share = 1.0 / len(carriers)
    args, kwargs = map_tensors(lambda t: _scale_gradient(t, share), (args, kwargs))
    return call.func(*args, **kwargs)


def uniform_fused_product(call: Call, addend: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> Any:
    """An addend plus a product, such as masked attention scores."""
    if is_operator(addend) or not (is_carrier(left) and is_carrier(right)):
        return fused_product(call, addend, left, right, **kwargs)
    return call.func(addend, _scale_gradient(left, 0.5), _scale_gradient(right, 0.5), **kwargs)


def attention(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Fused attention: V and the matrix take half of the relevance each, Q and K half of the matrix's each."""
    arguments = AttentionArguments.bind(call, *args, **kwargs)
    query, key = _scale_gradient(arguments.query, 0.25), _scale_gradient(arguments.key, 0.25)
    return replace(arguments, query=query, key=key, value=_scale_gradient(arguments.value, 0.5)).compute(call)


ATTN_LRP = EFFECTIVE.extend(
    "AttnLRP",
    {
        **dict.fromkeys(names_of_kind(OperatorKind.PRODUCT), uniform_product),
        **dict.fromkeys(names_of_kind(OperatorKind.FUSED_PRODUCT), uniform_fused_product),
        "scaled_dot_product_attention": attention,
        # By its first-order Taylor expansion: R_i = x_i (R_i - s_i sum_j R_j), the ordinary derivative.
        **dict.fromkeys(["softmax", "_softmax"], ordinary),
    },
)
"""Relevance through values, keys and queries."""

CP_LRP = EFFECTIVE.extend("CP-LRP", {})
"""Relevance through values only."""


def with_gamma(base: RuleSet, gamma: Gamma) -> RuleSet:
    """Return the rules of ``base`` with the gamma rule for linear layers and convolutions."""
    return base.extend(f"{base.name} with gamma", dict.fromkeys(names_of_kind(OperatorKind.WEIGHTED), gamma))


ATTENTION_RELEVANCE = with_gamma(ATTN_LRP, Gamma())
"""AttnLRP with the gamma rule of its authors' example for vision transformers."""

RELEVANCE = with_gamma(CP_LRP, Gamma(flat=True))
"""CP-LRP with the flat gamma rule: what DAVE averages by default. Relevance is conserved, but W is no linear map."""
