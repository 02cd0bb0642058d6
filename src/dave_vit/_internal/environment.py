"""Versions and device of a result, for records, and the time on a device."""

import platform
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import torch

from dave_vit._version import __version__


@cache
def versions() -> MappingProxyType[str, str]:
    """Return the versions of the software that a result depends on."""
    result = {"dave-vit": __version__, "python": platform.python_version()}
    return MappingProxyType(result | {package: version(package) for package in ("torch", "timm", "numpy", "pillow")})


def format_facts(facts: Mapping[str, Any]) -> str:
    """Format facts as one line: "images 16, seed 0"."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def synchronized_time(device: torch.device) -> float:
    """Return the time in seconds, after a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the kind of processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}" if device.type == "cpu" else device.type
