"""Attention scaled block by block, with ordinary derivatives (iterated integrated attributions)."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from dave_vit.engine.calls import Call, RuleSet
from dave_vit.engine.rule_sets.plain import PLAIN
from dave_vit.engine.rules.attention import is_attention


def interpolated(scales: dict[int, Tensor]) -> RuleSet:
    """Rules for one forward pass in which the attention of some blocks is scaled, with ordinary derivatives.

    Args:
        scales: number of a block to its factor for each row ``[rows]``.
    """
    block = itertools.count()

    def softmax(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        matrix: Tensor = call.func(input, *args, **kwargs)
        scale = scales.get(next(block)) if is_attention(input, *args, **kwargs) else None
        if scale is None:
            return matrix
        factor = scale.repeat_interleave(len(matrix) // len(scale)).to(matrix.dtype)  # [rows] or [rows * heads]
        return matrix * factor.view(-1, *[1] * (matrix.ndim - 1))

    return PLAIN.extend("interpolated attention", dict.fromkeys(["softmax", "_softmax"], softmax))
