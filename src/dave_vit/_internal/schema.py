"""Whether values that people wrote are of the types that annotations ask for: one schema for options and plans."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dave_vit._internal.registry import suggest_names
from dave_vit.errors import OptionError

SEEDS = 2**31
"""Seeds are below this one: tables and random generators keep so many."""
_LIMITS: dict[Any, Any] = {
    int: 2**63,
    float: math.inf,
}  # below them are all that torch can count with; NaN is below nothing


def check_values(values: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Refuses values under unknown names, and values of another type.

    Args:
        values: by name.
        known: the annotation of each name.
        what: has the values, in words, such as "method 'dave'".
    """
    for name, value in values.items():
        if name not in known:
            hint = suggest_names(str(name), list(known)) or f"; it takes: {', '.join(known) or 'none'}"
            raise OptionError(f"{what} has no option {name!r}{hint}")
        if not matches_type(value, known[name]):
            raise OptionError(f"{name} of {what} is {_short(value)}; expected {describe_type(known[name])}")
        if name == "seed" and isinstance(value, Integral):
            check_seed(int(value))


def check_fields(holder: Any, what: str) -> None:
    """Refuses a dataclass that holds values of other types than its annotations say."""
    check_values(vars(holder), get_type_hints(type(holder)), what)


def check_seed(seed: int) -> None:
    """Refuses seeds that cannot be kept."""
    if not 0 <= seed < SEEDS:
        raise OptionError(f"seed {seed}; expected 0 to {SEEDS - 1}")


def matches_type(value: Any, wanted: Any) -> bool:
    """Whether a value is of a type; numbers must be finite, and a list does for any sequence."""
    kind, parts = get_origin(wanted) or wanted, get_args(wanted)
    if kind in (Union, types.UnionType):
        return any(matches_type(value, one) for one in parts)
    if kind is Literal:
        return any(value == one and type(value) is type(one) for one in parts)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool) and abs(value) < _LIMITS[kind]
    if kind in (tuple, list, Sequence, Collection):
        return isinstance(value, list | tuple) and _parts_fit(value, kind, parts)
    if kind in (dict, Mapping):
        return isinstance(value, Mapping) and (not parts or all(matches_type(name, parts[0]) for name in value))
    return _is_one(value, kind)


def _parts_fit(value: Sequence[Any], kind: Any, parts: tuple[Any, ...]) -> bool:
    if kind is tuple and parts and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(matches_type, value, parts))
    return all(matches_type(one, parts[0]) for one in value) if parts else True


def _is_one(value: Any, kind: Any) -> bool:
    if kind is Callable:
        return callable(value)
    try:
        return isinstance(value, kind)
    except TypeError:  # no class, such as Any: nothing is asked for
        return True


def describe_type(wanted: Any) -> str:
    """A type in words."""
    kind, parts = get_origin(wanted) or wanted, get_args(wanted)
    if kind in (Union, types.UnionType):
        return " or ".join(describe_type(one) for one in parts if one is not type(None))
    if kind is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if kind is tuple and parts and parts[-1] is not Ellipsis:
        return f"[{', '.join(map(describe_type, parts))}]"
    if kind in (tuple, list, Sequence, Collection) and parts:
        return f"a list of {describe_type(parts[0])}"
    return "a table" if kind in (dict, Mapping) else getattr(kind, "__name__", str(kind))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
