"""Shared fixtures: one thread, real data where it is present."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Some virtual machines announce AMX without allowing it; bfloat16 on the CPU then dies. Must precede torch.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("DAVE_TEST_DATA", ROOT.parent / "shared" / "data"))


def _present(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"real data absent: {path.name} not found; set DAVE_TEST_DATA to the folder that holds it")
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return _present(DATA)


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    return _present(DATA.parent / "oracles")


@pytest.fixture(scope="session")
def deit_tiny(data_dir: Path) -> torch.nn.Module:
    """DeiT-Tiny with its real weights, straight from timm."""
    import timm
    from safetensors.torch import load_file

    weights = _present(data_dir / "weights" / "deit_tiny_patch16_224.safetensors")
    model = timm.create_model("deit_tiny_patch16_224")
    model.load_state_dict(load_file(weights))
    return model.eval()
