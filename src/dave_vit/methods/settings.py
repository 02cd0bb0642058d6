"""A method's options as plain data, for records."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from dave_vit.methods.base import Method


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
