"""Floating-point types of arithmetic, for models of any type."""

import torch


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return at least float32: half types are widened, float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def precise_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type of the device, for coordinates and running sums; Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
