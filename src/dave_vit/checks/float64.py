"""Force float64, also where a model's code casts to float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dave_vit.engine.operators import function_name
from dave_vit.engine.states import map_tensors, tensors


class Float64Mode(TorchFunctionMode):
    """Context in which float64 tensors stay float64.

    Language models compute norms and attention in float32 whatever their dtype; that rounding would hide the residual
    of an identity checked in float64. New tensors are float64 too unless a dtype is given.
    """

    def __enter__(self) -> Any:
        """Make float64 the default dtype."""
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Restore the default dtype."""
        torch.set_default_dtype(self._default)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call with float64 instead of float32."""
        kwargs, name = kwargs or {}, function_name(func).name
        if name == "scaled_dot_product_attention" and any(t.dtype == torch.float64 for t in tensors((args, kwargs))):
            args, kwargs = map_tensors(_widen, (args, kwargs))  # see AttentionArguments.bind
        casts = name == "float"
        if casts and not args[0].is_floating_point():
            return args[0].double()
        if not casts and not any(value is torch.float32 for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)  # nearly all calls
        if any(tensor.dtype == torch.float64 for tensor in tensors((args, kwargs))):
            if casts:
                return args[0]
            args = tuple(_to_float64(value) for value in args)
            kwargs = {name: _to_float64(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def _to_float64(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value == torch.float32 else value
