"""The methods of the paper's tables under the labels that runs, tables and plots share."""

from __future__ import annotations

from typing import Any

from dave_vit.evaluate import MethodEntry
from dave_vit.methods.options import filter_options

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    f"dave-{preset}": ("dave", {"preset": preset}) for preset in ("paper", "official")
}


def method_entry(label: str, samples: int) -> MethodEntry:
    """A method of a plan; the number of samples, or of steps, goes to those that take any.

    Args:
        label: name of a method, or "dave-paper" and "dave-official" for DAVE with that preset.
        samples: the paper's T.
    """
    name, options = _OPTIONS.get(label, (label, {}))
    return MethodEntry(name, {**filter_options(name, samples=samples, steps=samples), **options}, label)
