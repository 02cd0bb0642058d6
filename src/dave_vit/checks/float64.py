"""Force float64, also where a model's code casts to float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dave_vit._internal.torch_private import tree_leaves
from dave_vit.engine.operators import function_name
from dave_vit.engine.states import map_tensors, tensors

# Functions that make floating tensors, and those that make them of floating numbers.
_FACTORIES = frozenset(
    """bartlett_window blackman_window empty empty_permuted empty_strided eye fft_fftfreq fft_rfftfreq hamming_window
    hann_window kaiser_window linspace logspace normal ones rand randn zeros""".split()
)
_CONVERSIONS = frozenset("arange as_tensor asarray full range scalar_tensor tensor".split())


class Float64Mode(TorchFunctionMode):
    """Context in which float64 tensors stay float64.

    Language models compute norms and attention in float32 whatever their dtype; that rounding would hide the residual
    of an identity checked in float64. New tensors are float64 too unless a dtype is given. The default dtype of torch
    is left alone: it belongs to all threads.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call with float64 instead of float32."""
        kwargs, name = kwargs or {}, function_name(func).name
        given = tensors((args, kwargs))
        if not given:
            is_new = kwargs.get("dtype") is None and _makes_floats(name, args, kwargs)
            return func(*args, **({**kwargs, "dtype": torch.float64} if is_new else kwargs))
        has_float64 = any(tensor.dtype == torch.float64 for tensor in given)
        if name == "scaled_dot_product_attention" and has_float64:
            args, kwargs = map_tensors(_widen, (args, kwargs))  # see AttentionArguments.bind
        if name == "float" and (has_float64 or not args[0].is_floating_point()):
            return args[0].double()
        if any(value is torch.float32 for value in (*args, *kwargs.values())):
            if has_float64:
                args = tuple(_to_float64(value) for value in args)
                kwargs = {name: _to_float64(value) for name, value in kwargs.items()}
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        is_made_of_integers = not any(tensor.is_floating_point() or tensor.is_complex() for tensor in given)
        if is_made_of_integers and isinstance(result, Tensor) and result.dtype == torch.float32:
            return _run_on_integers(func, name, args, kwargs)
        return result


def _makes_floats(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function that is given no tensors makes one of the default dtype."""
    return name in _FACTORIES or (
        name in _CONVERSIONS and any(isinstance(value, float) for value in tree_leaves((args, kwargs)))
    )


def _run_on_integers(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a function, such as a quotient, that makes floating numbers of integers, in float64."""
    if name == "where":  # of a mask, and of two numbers
        return func(args[0], *(torch.as_tensor(value, dtype=torch.float64) for value in args[1:]))
    return func(*map_tensors(Tensor.double, args), **map_tensors(Tensor.double, kwargs))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def _to_float64(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value == torch.float32 else value
