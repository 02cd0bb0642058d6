"""Residual streams in bfloat16 under autocast, which would otherwise widen every sum to float32.

The range of bfloat16 is that of float32, so that residual streams fit into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.calls import Call, Rule
from dave_vit.engine.fast import register_substitute
from dave_vit.engine.states import map_tensors, mark, state_of, tensors


def is_bfloat16_autocast(tensor: Tensor) -> bool:
    """Return whether autocast works in bfloat16 on the device of a tensor."""
    device = tensor.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16


def _applies(plain: Rule, call: Call, *args: Any, **kwargs: Any) -> bool:
    terms = tensors((args, kwargs))
    return any(term.dtype is torch.bfloat16 for term in terms) and is_bfloat16_autocast(terms[0])


def _narrow(tensor: Tensor) -> Tensor:
    return mark(tensor.to(torch.bfloat16), state_of(tensor)) if tensor.dtype is torch.float32 else tensor


# Residual streams pass through these, and they return the widest type of their arguments.
@register_substitute("add", "sub", "cat", "mul", applies=_applies)
def keep_bfloat16(plain: Rule, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Run a sum or product in bfloat16 where one argument is in it already."""
    args, kwargs = map_tensors(_narrow, (args, kwargs))
    return plain(call, *args, **kwargs)
