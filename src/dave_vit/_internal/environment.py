"""What a result was computed with and on, as every kind of result says it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import torch

from dave_vit._version import __version__

_PACKAGES = ("torch", "timm", "numpy", "pillow")


@cache
def versions() -> MappingProxyType[str, str]:
    """Of the software that a result depends on."""
    found = {"dave-vit": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return MappingProxyType(found)


def format_facts(facts: Mapping[str, Any]) -> str:
    """Facts as one line: "images 16, seed 0"."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}" if device.type == "cpu" else device.type
