"""Options of methods: derived from their signatures, parsed, checked, and as plain data for records."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

from torch import nn

from dave_vit._internal.schema import check_values, matches_type, type_hints
from dave_vit.methods.base import METHODS, Method
from dave_vit.methods.dave import DAVE
from dave_vit.methods.presets import SWITCHES, load_preset


@dataclass(frozen=True)
class Option:
    """One option of a method.

    Attributes:
        type: its annotation.
        default: its default; None where that depends on others, such as the preset.
    """

    type: Any = Any
    default: Any = None


def declared_options(method: str) -> dict[str, Option]:
    """Return the options of a method by their names.

    Options that it passes on to its base class are included, except those in its tuple `fixed_options`.
    """
    kind = METHODS[method]
    options: dict[str, Option] = {}
    for base in kind.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        hints, parameters = type_hints(constructor), list(inspect.signature(constructor).parameters.values())
        named = [one for one in parameters[2:] if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        options = {**{one.name: Option(hints.get(one.name, Any), one.default) for one in named}, **options}
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    if issubclass(kind, DAVE):  # the defaults of its switches are the preset's
        options |= {name: Option(get_type_hints(holder)[field]) for name, (holder, field) in SWITCHES.items()}
    return {name: one for name, one in options.items() if name not in getattr(kind, "fixed_options", ())}


def filter_options(method: str, **values: Any) -> dict[str, Any]:
    """Return those of the values that the method takes; None is left out."""
    known = declared_options(method)
    given = {name: value for name, value in values.items() if value is not None and name in known}
    return {name: value for name, value in given.items() if matches_type(value, known[name].type)}


def max_samples(method: str, options: Mapping[str, Any]) -> int:
    """Return the largest number of samples that a sampling method draws with these options."""
    known = declared_options(method)
    samples = options.get("samples") if options.get("samples") != "auto" else options.get("limit")
    if samples is None and isinstance(known["samples"].default, int):
        return known["samples"].default
    return int(samples or load_preset(options.get("preset") or known["preset"].default, nn.Identity()).samples)


def check_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options if the method has all of them and their values have the right types."""
    check_values(options, {name: one.type for name, one in declared_options(method).items()}, f"method {method!r}")
    return dict(options)


def parse_options(method: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse and check options of a method given as text."""
    return check_options(method, {name: parse_value(text) for name, text in texts.items()})


def parse_value(text: str) -> Any:
    """Parse a value written as JSON, such as 0.5, true or [0.9, 1.1]; anything else is a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()


def method_settings(method: Method) -> dict[str, Any]:
    """Return the resolved options of a method, defaults included."""
    public = {name: to_json_value(value) for name, value in vars(method).items() if not name.startswith("_")}
    return {name: value for name, value in public.items() if value is not None}


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON types; None for anything else, such as the model."""
    if isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: to_json_value(part) for name, part in vars(value).items()}
        return {"type": type(value).__name__, **{name: part for name, part in fields.items() if part is not None}}
    if isinstance(value, tuple | list):
        return [to_json_value(part) for part in value]
    return None
