"""Labels of the methods in the paper's tables, shared by runs, tables and plots."""

from __future__ import annotations

from dave_vit.evaluate import MethodEntry
from dave_vit.methods.options import filter_options

_PRESETS = {"dave-paper": "paper", "dave-official": "official"}


def method_entry(label: str, samples: int) -> MethodEntry:
    """Return the plan's entry for a label; methods that take samples or steps get that many.

    Args:
        label: name of a method, or "dave-paper" and "dave-official" for DAVE with that preset.
        samples: the paper's T.
    """
    preset = {"preset": _PRESETS[label]} if label in _PRESETS else {}
    name = "dave" if preset else label
    return MethodEntry(name, {**filter_options(name, samples=samples, steps=samples), **preset}, label)
