"""The rule set of the effective transformation (METHOD: eq. (3), appendix A)."""

from __future__ import annotations

from collections.abc import Iterable

from dave_vit.intercept.calls import Rule, RuleSet
from dave_vit.intercept.names import FUSED_PRODUCTS, MOVES, OPERATORS, PRODUCTS, SELECTIONS, SUMS, WEIGHTED
from dave_vit.rules import attention, linear, norms
from dave_vit.rules.activations import ACTIVATIONS, gated


def _under(rule: Rule, names: Iterable[str]) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


EFFECTIVE = RuleSet(
    "effective",
    {
        **_under(linear.move, MOVES),
        **_under(linear.total, SUMS),
        **_under(linear.product, PRODUCTS),
        **_under(linear.weighted, WEIGHTED),
        **_under(linear.fused_product, FUSED_PRODUCTS),
        **_under(linear.selection, SELECTIONS),
        **_under(linear.frozen, OPERATORS),
        **_under(
            linear.dropout,
            ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"],
        ),
        **ACTIVATIONS,
        "div": linear.quotient,
        "pow": linear.power,
        "square": linear.power,
        "lerp": linear.linear_combination,
        "glu": linear.gated_linear_unit,
        "batch_norm": norms.batch_norm,
        "var_mean": linear.mean_and_spread,
        "std_mean": linear.mean_and_spread,
        "__setitem__": linear.set_item,
        "copy": linear.copy_into,
        "__iter__": linear.iterate,
        "layer_norm": norms.layer_norm,
        "rms_norm": norms.rms_norm,
        "group_norm": norms.group_norm,
        "instance_norm": norms.instance_norm,
        "normalize": norms.normalize,
        "scaled_dot_product_attention": attention.scaled_dot_product_attention,
        "multi_head_attention_forward": attention.multi_head_attention,
        "softmax": attention.softmax,
        "_softmax": attention.softmax,
    },
)
"""Every operator frozen: DAVE's effective transformation."""

OFFICIAL_GATE = EFFECTIVE.extend("effective, GELU gate 1 at zero", {"gelu": gated(1.0)})
"""As the authors' public code has it: the GELU gate at x = 0 is 1 instead of its limit 0.5."""
