"""Models that see only some of their tokens (transformer input sampling)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dave_vit.engine.calls import Call, RuleSet
from dave_vit.engine.rule_sets.plain import PLAIN
from dave_vit.engine.rules.attention import is_attention
from dave_vit.engine.rules.linear import ordinary


def sampled(kept: Tensor) -> RuleSet:
    """Rules for one forward pass in which no token looks at tokens that are left out, and no mean counts them.

    What comes of the others is the same as if those had been taken out of the sequence.

    Args:
        kept: True for the tokens that are seen, for each row ``[rows, N]``.
    """
    rows, tokens = kept.shape

    def softmax(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_attention(input, *args, **kwargs) and input.shape[-1] == tokens:
            keys = kept.repeat_interleave(len(input) // rows, 0)  # [rows, N] or [rows * heads, N]
            input = input.masked_fill(~keys.view(len(input), *[1] * (input.ndim - 2), tokens), -float("inf"))
        return call.func(input, *args, **kwargs)  # type: ignore[no-any-return]

    def mean(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        over = kwargs.get("dim", args[0] if args else None)
        if input.ndim != 3 or len(input) != rows or over not in (1, [1], (1,)) or input.shape[1] > tokens:
            return ordinary(call, input, *args, **kwargs)  # type: ignore[no-any-return]
        weight = kept[:, -input.shape[1] :, None].to(input.dtype)  # class and register tokens may be left out before
        keepdim = kwargs.get("keepdim", len(args) > 1 and args[1])
        return (input * weight).sum(1, keepdim=keepdim) / (weight.sum(1, keepdim=True) if keepdim else weight.sum(1))

    return PLAIN.extend("sampled tokens", {**dict.fromkeys(["softmax", "_softmax"], softmax), "mean": mean})
