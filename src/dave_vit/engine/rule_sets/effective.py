"""The rule set of the effective transformation (METHOD: eq. (3), appendix A)."""

from __future__ import annotations

from dave_vit.engine import function_names as names
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.rules import attention, linear, norms, products
from dave_vit.engine.rules.activations import ACTIVATIONS, gated, gelu_gate

EFFECTIVE = RuleSet(
    "effective",
    {
        **dict.fromkeys(names.MOVES, linear.move),
        **dict.fromkeys(names.REDUCTIONS | names.TRANSFORMS, linear.reduction),
        **dict.fromkeys(names.SUMS, linear.total),
        **dict.fromkeys(names.PRODUCTS, products.product),
        **dict.fromkeys(names.WEIGHTED, products.weighted),
        "conv2d": products.convolution,
        **dict.fromkeys(names.FUSED_PRODUCTS, products.fused_product),
        **dict.fromkeys(names.SELECTIONS, linear.selection),
        **dict.fromkeys(names.OPERATORS, linear.frozen),
        **dict.fromkeys(names.DROPOUTS, linear.dropout),
        **ACTIVATIONS,
        "div": products.quotient,
        "addcdiv": products.fused_quotient,
        **dict.fromkeys(["pow", "square"], products.power),
        "lerp": linear.linear_combination,
        "diff": linear.difference,
        "glu": products.gated_linear_unit,
        "batch_norm": norms.batch_norm,
        **dict.fromkeys(["var_mean", "std_mean"], linear.mean_and_spread),
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
        **dict.fromkeys(["softmax", "_softmax"], attention.softmax),
    },
)
"""Every operator frozen: DAVE's effective transformation."""

THROUGH_DETACH = EFFECTIVE.extend("effective, through detach", {"detach": linear.undetached})
"""For models that detach what they go on with, which matters for their training only (RT-DETR's queries)."""

OFFICIAL_GATE = EFFECTIVE.extend("effective, GELU gate 1 at zero", {"gelu": gated(1.0, gelu_gate)})
"""As the authors' public code has it: the GELU gate at x = 0 is 1 instead of its limit 0.5."""
