"""Arguments of torch functions by position, as rules expect them, also where a model gives them by name."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from dave_vit.engine.states import tensors


def place_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with tensors given by name moved to their position, as far as positions follow each other.

    ``torch.permute(input=x, dims=order)`` becomes ``torch.permute(x, dims=order)``.
    """
    if not any(map(tensors, kwargs.values())):
        return args, kwargs
    placed, named = list(args), dict(kwargs)
    for name in _required_parameters(func)[len(args) :]:
        if not tensors(named.get(name)):
            break
        placed.append(named.pop(name))
    return tuple(placed), named


@cache
def _required_parameters(func: Any) -> tuple[str, ...]:
    """Return the parameters of a function that have no default; torch keeps those of built-in functions in a table."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        template = torch.overrides.get_testing_overrides().get(func)
        signature = inspect.signature(template) if template else inspect.Signature()
    required = [name for name, one in signature.parameters.items() if one.default is inspect.Parameter.empty]
    return tuple("input" if name == "self" else name for name in required)
