"""The states of a tensor under the interception: constant, carrier, operator; and the gates among the carriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

_OPERATOR = "_dave_operator"
_GATE = "_dave_gate"


def is_carrier(value: Any) -> bool:
    """Whether a value is a tensor that the input reaches linearly."""
    return isinstance(value, Tensor) and value.requires_grad


def is_operator(value: Any) -> bool:
    """Whether a value is a tensor that depends on the input but is frozen."""
    return isinstance(value, Tensor) and hasattr(value, _OPERATOR)


def is_gate(value: Any) -> bool:
    """Whether a carrier is an activation's output: the factor that a product of two carriers freezes."""
    return isinstance(value, Tensor) and hasattr(value, _GATE)


def mark_gate(value: Tensor) -> Tensor:
    """Remember that a carrier came out of an activation."""
    setattr(value, _GATE, True)
    return value


def mark_operator(value: Tensor) -> Tensor:
    """Remember that a tensor depends on the input and is frozen."""
    setattr(value, _OPERATOR, True)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nesting with every tensor replaced; other values are kept as they are."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        if not any(True for _ in tensors(value)):
            return value
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value
