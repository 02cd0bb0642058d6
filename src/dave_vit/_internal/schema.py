"""Check values that users wrote against type annotations, for options and plans."""

import math
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from dave_vit._internal.registry import suggest_names
from dave_vit.errors import OptionError

Name = TypeVar("Name", bound=str)
T = TypeVar("T")

SEEDS = 2**31
"""Seeds are below this number: tables and random generators store 31 bits."""
_LIMITS: dict[Any, Any] = {int: 2**63, float: math.inf}  # torch takes values below these; NaN is below nothing


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number in an annotation, such as ``Annotated[float, Bounds(above=0, at_most=1)]``."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.at_least <= value <= self.at_most and self.above < value < self.below

    def __str__(self) -> str:
        limits = {name.replace("_", " "): limit for name, limit in vars(self).items() if math.isfinite(limit)}
        return "".join(f", {name} {limit:g}" for name, limit in limits.items())


Count = Annotated[int, Bounds(at_least=1)]
NonNegative = Annotated[float, Bounds(at_least=0)]
Positive = Annotated[float, Bounds(above=0)]


def check_annotations(holder: Any) -> None:
    """Raise OptionError for attributes of an object that do not match the annotations of its class."""
    for name, annotation in type_hints(type(holder)).items():
        if name in vars(holder):
            check_type(name, vars(holder)[name], annotation)


class Checked:
    """Base of dataclasses whose values must match their annotations."""

    def __post_init__(self) -> None:
        check_annotations(self)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def declare_options(cls: type[T]) -> type[T]:
    """Make the annotated attributes of a class its options, which its constructor takes.

    A class that has a constructor of its own keeps it, and so do its subclasses that declare no options.
    """
    hints = type_hints(cls)
    own = vars(cls).get("__annotations__", {})
    declared = [name for name in own if get_origin(hints.get(name, ClassVar[Any])) is not ClassVar]
    if declared and "__init__" not in vars(cls):
        cls.__annotations__ = {name: hints[name] for name in declared}  # so that the constructor has no bare names
        dataclass(eq=False, repr=False)(cls)
    return cls


def type_hints(kind: Any) -> dict[str, Any]:
    """Return the annotations of a class or function; none where names cannot be resolved, as in plugins."""
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError:
        return {}


def check_type(name: str, value: Any, annotation: Any) -> None:
    """Raise OptionError for the value of an option that does not match its annotation."""
    if get_origin(annotation) is Literal:
        check_choice(name, value, get_args(annotation))
    if not matches_type(value, annotation):
        raise OptionError(f"{name} is {_short(value)}; expected {describe_type(annotation)}")


def check_choice(name: str, value: Name, known: Collection[str]) -> Name:
    """Return the value of an option if it is one of the known names."""
    if value not in known:
        raise OptionError(f"{name} {value!r}; expected one of {', '.join(known)}")
    return value


def check_values(values: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Raise OptionError for values with unknown names, and for values of another type.

    Args:
        values: the values by name.
        known: the annotation of each name.
        what: what the values belong to, for messages, such as "method 'dave'".
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
    """Raise OptionError for a dataclass whose values do not match its annotations."""
    check_values(vars(holder), type_hints(type(holder)), what)


def check_seed(seed: int) -> None:
    """Raise OptionError for seeds out of range."""
    if not 0 <= seed < SEEDS:
        raise OptionError(f"seed {seed}; expected 0 to {SEEDS - 1}")


def matches_type(value: Any, annotation: Any) -> bool:
    """Return whether a value matches an annotation; numbers must be finite, and a list matches any sequence."""
    kind, parts = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        return any(matches_type(value, one) for one in parts)
    if kind is Annotated:
        return matches_type(value, parts[0]) and value in parts[1]
    if kind is Literal:
        return any(value == one and type(value) is type(one) for one in parts)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool) and abs(value) < _LIMITS[kind]
    if kind in (tuple, list, Sequence, Collection):
        if not isinstance(value, list | tuple):
            return False
        if kind is tuple and parts and parts[-1] is not Ellipsis:
            return len(value) == len(parts) and all(map(matches_type, value, parts))
        return all(matches_type(one, parts[0]) for one in value) if parts else True
    if kind in (dict, Mapping):
        return isinstance(value, Mapping) and (not parts or all(matches_type(name, parts[0]) for name in value))
    if kind is Callable:
        return callable(value)
    try:
        return isinstance(value, kind)
    except TypeError:  # not a class, such as Any: anything matches
        return True


def describe_type(annotation: Any) -> str:
    """Describe a type for messages."""
    kind, parts = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(describe_type(one) for one in parts if one is not type(None))
    if kind is Annotated:
        return f"{describe_type(parts[0])}{parts[1]}"
    if kind is Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else repr(parts[0])
    if kind is tuple and parts and parts[-1] is not Ellipsis:
        return f"[{', '.join(map(describe_type, parts))}]"
    if kind in (tuple, list, Sequence, Collection) and parts:
        return f"a list of {describe_type(parts[0])}"
    return "a table" if kind in (dict, Mapping) else getattr(kind, "__name__", str(kind))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
