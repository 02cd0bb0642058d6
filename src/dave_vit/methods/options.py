"""The options of a method, read off its signature: what the command line, the page and plans know of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import nn

from dave_vit._internal.schema import check_values, describe_type, matches_type
from dave_vit.methods.base import METHODS
from dave_vit.methods.dave import DAVE
from dave_vit.methods.presets import AROUND_SWITCHES, NOISE_SWITCHES, SPATIAL_SWITCHES, load_preset
from dave_vit.neighborhood import Neighborhood, Noise, Spatial


@dataclass(frozen=True)
class Option:
    """One option of a method.

    Attributes:
        name: as `create_method` takes it.
        type: its annotation.
        default: what it is where nothing is said; None where that depends on others, such as the preset.
    """

    name: str
    type: Any = Any
    default: Any = None

    @property
    def choices(self) -> tuple[Any, ...]:
        """All that may be said, where that is a list."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def expected(self) -> str:
        """What may be said, in words."""
        return describe_type(self.type)


def declared_options(method: str) -> dict[str, Option]:
    """The options of a method by their names.

    Those that it hands on to its base are included; those that it settles for its base, named by a tuple `settled` of
    its class, are not.
    """
    kind = METHODS[method]
    found: dict[str, Option] = {}
    for base in kind.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is not None:
            found = {**{one.name: one for one in _options(constructor)}, **found}
            if not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(constructor).parameters.values()):
                break
    switches = {one.name: one for one in _switches()} if issubclass(kind, DAVE) else {}
    return {name: one for name, one in (found | switches).items() if name not in getattr(kind, "fixed_options", ())}


def _options(constructor: Any) -> Iterator[Option]:
    try:
        hints = get_type_hints(constructor)
    except NameError:  # a name that only type checkers import; values of these options are not looked into
        hints = {}
    for name, one in list(inspect.signature(constructor).parameters.items())[2:]:  # after self and the model
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            yield Option(name, hints.get(name, Any), one.default)


def _switches() -> Iterator[Option]:
    """Single points of DAVE's neighbourhood; what they are otherwise is the preset's."""
    places = [(Spatial, {name: name for name in SPATIAL_SWITCHES}), (Noise, NOISE_SWITCHES)]
    for holder, names in [*places, (Neighborhood, {name: name for name in AROUND_SWITCHES})]:
        hints = get_type_hints(holder)
        yield from (Option(name, hints[field]) for name, field in names.items())


def filter_options(method: str, **values: Any) -> dict[str, Any]:
    """Those of the values that the method takes; None stands for nothing said."""
    known = declared_options(method)
    given = {name: value for name, value in values.items() if value is not None and name in known}
    return {name: value for name, value in given.items() if matches_type(value, known[name].type)}


def max_samples(method: str, options: Mapping[str, Any]) -> int:
    """How many samples a method that draws any will take at most, with these options."""
    known = declared_options(method)
    said = options.get("samples") if options.get("samples") != "auto" else options.get("limit")
    if said is None and isinstance(known["samples"].default, int):
        return known["samples"].default
    return int(said or load_preset(options.get("preset") or known["preset"].default, nn.Identity()).samples)


def check_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a method, if it has all of them and their values are of the right kind."""
    check_values(options, {name: one.type for name, one in declared_options(method).items()}, f"method {method!r}")
    return dict(options)


def parse_options(method: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Options of a method out of texts, checked."""
    return check_options(method, {name: parse_value(text) for name, text in texts.items()})


def parse_value(text: str) -> Any:
    """A value that was written as JSON, such as 0.5, true or [0.9, 1.1]; anything else is a word."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
