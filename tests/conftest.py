"""Shared by all tests: one thread, the order of files, real data where it is present."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

# Some virtual machines announce AMX without allowing it; bfloat16 on the CPU then dies. Must precede torch.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# They begin first, so that no worker is left with one of them while the other has nothing to do.
LONGEST = (
    "test_models_coverage.py",
    "test_real_data.py",
    "test_recorded_outputs.py",
    "test_evaluate_engines.py",
    "test_newcomer.py",
    "test_model_changes.py",
    "test_web_browser.py",
    "test_evaluate_survival.py",
    "test_docs.py",
    "test_web_page.py",
    "test_models_left_alone.py",
    "test_default_scores.py",
    "test_method_oracles_gradients.py",
    "test_analysis_report.py",
    "test_builtin_models.py",
    "test_evaluate_cost.py",
    "test_method_contract.py",
    "test_fast_kernels.py",
)
ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("DAVE_TEST_DATA", ROOT.parent / "shared" / "data"))


def _present(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"real data absent: {path.name} not found; set DAVE_TEST_DATA to the folder that holds it")
    return path


def pytest_configure(config: pytest.Config) -> None:
    """One thread where tests run; a process that hands them out to workers need not wait for torch."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; pytest-xdist takes files in this order where it is told not to count tests."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


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
