"""Ordinary derivatives that also record what each additive constant does (FullGrad)."""

from __future__ import annotations

from dave_vit.engine.function_names import WEIGHTED
from dave_vit.engine.rule_sets.plain import PLAIN
from dave_vit.engine.rules.attention import multi_head_attention
from dave_vit.engine.rules.linear import affine

FULL_GRADIENT = PLAIN.extend(
    "full gradient",
    {
        # Layer and group norms of zero are their bias.
        **dict.fromkeys([*WEIGHTED, "layer_norm", "group_norm", "add", "sub", "rsub", "cat", "stack"], affine),
        "multi_head_attention_forward": multi_head_attention,
    },
)
"""The constants of all layers."""

FULL_GRADIENT_OF_CONVOLUTIONS = PLAIN.extend(
    "full gradient of convolutions", dict.fromkeys(WEIGHTED - {"linear"}, affine)
)
"""The constants of convolutions and batch norms only."""
