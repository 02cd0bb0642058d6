"""The states of a tensor under the interception, and how they combine.

* constant: it does not depend on the input.
* carrier: the input reaches it linearly, so it carries gradient.
* gate: a carrier whose numbers are the output of an activation, at most moved or scaled since.
* operator: it depends on the input and is frozen.

Where tensors meet, one rule says what comes out, whatever the spelling:

* A product of carriers keeps one of them and freezes the others, which must be gates; a plain carrier takes precedence
  over gates. Where it is not clear which one to keep (two plain carriers, or two gates), the product is an operator.
* A sum with an operator is an operator; the sum of several carriers is a carrier.
* A constant that is zero for certain stays one in a product with operators, such as the first state of a scan.
* A function that mixes the numbers of a gate with each other (a matrix product, a mean) makes it a plain carrier.
"""

from collections.abc import Callable, Iterable
from enum import Enum
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor

_STATE = "_dave_state"
_ZERO = "_dave_zero"
_LISTS = (list, tuple)
_NESTS = (list, tuple, dict)
_T = TypeVar("_T")


class State(Enum):
    """How a tensor depends on the input."""

    CONSTANT = "constant"
    CARRIER = "carrier"
    GATE = "gate"
    OPERATOR = "operator"


def state_of(value: Any) -> State:
    """Return the state of a tensor; anything else is a constant."""
    if not isinstance(value, Tensor):
        return State.CONSTANT
    marked = getattr(value, _STATE, None)
    if value.requires_grad:  # takes precedence: a mark from before an in-place write may be outdated
        return State.GATE if marked is State.GATE else State.CARRIER
    return State.OPERATOR if marked is State.OPERATOR else State.CONSTANT


def is_carrier(value: Any) -> bool:
    """Return whether a value is a tensor that the input reaches linearly: a plain carrier or a gate."""
    return isinstance(value, Tensor) and value.requires_grad


def is_operator(value: Any) -> bool:
    """Return whether a value is a tensor that depends on the input but is frozen."""
    return state_of(value) is State.OPERATOR


def depends_on_input(value: Any) -> bool:
    """Return whether a value is a tensor that depends on the input, carried or frozen."""
    return state_of(value) is not State.CONSTANT


def is_known(carrier: Tensor) -> bool:
    """Return whether a carrier was made under the interception, or is a view of one that was."""
    return hasattr(carrier, _STATE) or (carrier._base is not None and hasattr(carrier._base, _STATE))


def mark(value: _T, state: State) -> _T:
    """Set the state of all tensors of a result."""
    for tensor in (value,) if isinstance(value, Tensor) else tensors(value):
        setattr(tensor, _STATE, state)
    return value


def mark_zero(value: _T) -> _T:
    """Note that all tensors of a result are constants and zero, until something is written into them."""
    for tensor in tensors(value):
        if not tensor.is_inference():  # which counts no writes
            setattr(tensor, _ZERO, tensor._version)
    return value


def is_zero(value: Any) -> bool:
    """Return whether a value is the number 0, or a tensor that was marked as zero and not written to since."""
    if not isinstance(value, Tensor):
        return isinstance(value, int | float) and value == 0
    return hasattr(value, _ZERO) and getattr(value, _ZERO) == value._version


def product_state(states: Iterable[State]) -> State:
    """Return the state of a product of tensors in these states."""
    factors = list(states)
    plain, gates = factors.count(State.CARRIER), factors.count(State.GATE)
    if plain + gates == 0:
        return State.OPERATOR if State.OPERATOR in factors else State.CONSTANT
    if plain > 1 or (plain == 0 and gates > 1):
        return State.OPERATOR
    return State.CARRIER if plain else State.GATE


def state_of_product(*factors: Tensor) -> State:
    """Return the state of a product of these tensors; a constant zero makes it a constant."""
    return State.CONSTANT if any(map(is_zero, factors)) else product_state(map(state_of, factors))


def sum_state(states: Iterable[State]) -> State:
    """Return the state of a sum, or of a concatenation, of tensors in these states."""
    terms = list(states)
    if State.OPERATOR in terms:
        return State.OPERATOR
    carriers = [state for state in terms if state is not State.CONSTANT]
    return State.CARRIER if len(carriers) > 1 else (*carriers, State.CONSTANT)[0]


def mixed_state(state: State) -> State:
    """Return the state after the numbers of a tensor are mixed with each other."""
    return State.CARRIER if state is State.GATE else state


def without_gates(factors: Any) -> Any:
    """Return the factors of a product, with gates frozen where a plain carrier is among them."""
    if State.CARRIER not in map(state_of, tensors(factors)):
        return factors
    return map_tensors(lambda factor: factor.detach() if state_of(factor) is State.GATE else factor, factors)


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    collected: list[Tensor] = []
    _collect(value, collected)
    return collected


def _collect(value: Any, collected: list[Tensor]) -> None:
    # Called for every argument of every function: filling a list is much faster than nested generators.
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, _LISTS) else ():
        if isinstance(item, Tensor):
            collected.append(item)
        elif isinstance(item, _NESTS):
            _collect(item, collected)


def _map_item(function: Callable[[Tensor], Any], item: Any) -> Any:
    # Most arguments are a tensor or a number, for which one more call would cost as much as the work itself.
    if isinstance(item, Tensor):
        return function(item)
    return map_tensors(function, item) if isinstance(item, _NESTS) else item


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested lists, tuples and dicts; other values are kept."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _LISTS):
        items = [_map_item(function, item) for item in value]
        if all(map(is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _map_item(function, item) for key, item in value.items()}
    return value


_SOURCE = "_dave_source"


def cast_constant(constant: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a constant to a type; ``source_of`` returns what it was cast from."""
    cast = constant.detach().to(dtype)
    setattr(cast, _SOURCE, constant)
    return cast


def source_of(constant: Tensor) -> Tensor:
    """Return what ``cast_constant`` was given, or the constant itself."""
    return getattr(constant, _SOURCE, constant)  # type: ignore[no-any-return]
