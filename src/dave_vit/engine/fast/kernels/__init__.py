"""Fused Triton kernels for CUDA; each has a plain form elsewhere that is its fallback and its oracle."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dave_vit._internal.torch_private import is_dispatch_traced
from dave_vit.engine.fast import is_enabled

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def load() -> Any:
    """Return the module that launches the kernels; None where torch or Triton is missing or too old."""
    try:
        return import_module("dave_vit.engine.fast.kernels.launchers")
    except (ImportError, AttributeError):
        return None


def are_available(*tensors: Tensor | None) -> bool:
    """Return whether kernels can be used, and these tensors are on CUDA devices."""
    return is_enabled() and all(one is None or one.is_cuda for one in tensors) and load() is not None


def take(*tensors: Tensor | None) -> bool:
    """Return whether the kernels take these tensors; not while somebody traces, who would not see a kernel."""
    fit = all(one is None or one.dtype in DTYPES for one in tensors)
    return fit and not is_dispatch_traced() and are_available(*tensors)
