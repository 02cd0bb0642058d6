"""Activations as gates: f(x) = x * phi(x), of which only x carries gradient (appendix A, GELU / Swish)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.calls import Call, carry
from dave_vit.engine.states import State, mark


@dataclass(frozen=True)
class GateRule:
    """Rule of an activation with f(0) = 0: the gate phi(x) = f(x) / x is frozen.

    Attributes:
        at_zero: the limit of f(x) / x at x = 0.
    """

    at_zero: float

    def __call__(self, call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the activation; its derivative is the gate."""
        if input.is_complex():
            raise call.mode.refusal(call.name)
        x = input.detach()
        value = call.func(x, *args, **kwargs)
        gate = (value / x).nan_to_num_(nan=self.at_zero)  # 0 / 0 is the one NaN
        return mark(carry(lambda: value, torch.mul, input, saved=(gate,)), State.GATE)
