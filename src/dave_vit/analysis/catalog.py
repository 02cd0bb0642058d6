"""The methods of the paper's tables under the labels that runs, tables and plots share."""

from __future__ import annotations

import inspect
from typing import Any

from dave_vit.bench import MethodEntry
from dave_vit.methods import METHODS

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {"dave-paper": ("dave", {"preset": "paper"})}
_COUNTS = ("samples", "steps")


def method_entry(label: str, samples: int) -> MethodEntry:
    """A method of a plan; the number of samples, or of steps, goes to those that take any.

    Args:
        label: name of a method, or "dave-paper" for DAVE with the paper's preset.
        samples: the paper's T.
    """
    name, options = _OPTIONS.get(label, (label, {}))
    known = inspect.signature(METHODS[name]).parameters
    counts = {count: samples for count in _COUNTS if count in known}
    return MethodEntry(name, {**counts, **options}, label)
