"""Random numbers that depend on a seed and a sample's index, and on nothing else."""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_STREAMS = {"spatial": 0, "noise": 1}


def sample_generator(seed: int, index: int, stream: str) -> torch.Generator:
    """Return a new generator on the CPU for one sample; torch's global generator is neither read nor moved.

    Args:
        seed: any integer.
        index: number of the sample, below 2**31.
        stream: "spatial" or "noise", so that switching one off leaves the other's draws as they were.
    """
    # The CPU generator keeps 32 bits of its seed. Mixing is one-to-one on them, so that the samples of one seed never
    # share a generator.
    key = _mix(seed & _MASK) ^ _mix((seed >> 32 & _MASK) + 1 & _MASK)
    mixed = _mix(_mix(2 * index + _STREAMS[stream]) ^ key)
    generator = torch.Generator(device="cpu")
    generator.manual_seed(mixed)
    return generator


def normal_samples(seed: int, shape: Sequence[int], start: int, stop: int) -> Tensor:
    """Return standard normal values of samples ``start`` to ``stop`` on the CPU: ``[n, *shape]``."""
    generators = [sample_generator(seed, index, "noise") for index in range(start, stop)]
    return torch.stack([torch.randn(tuple(shape), generator=one, device="cpu") for one in generators])


def _mix(value: int) -> int:
    """Permute the 32-bit integers so that the result spreads every bit over all (MurmurHash3's final step)."""
    value ^= value >> 16
    value = value * 0x85EBCA6B & _MASK
    value ^= value >> 13
    value = value * 0xC2B2AE35 & _MASK
    return value ^ value >> 16
