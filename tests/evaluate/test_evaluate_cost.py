"""What scoring costs beside the passes of the model that it needs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from dave_vit.metrics import METRICS

FEWER = {
    **{name: {"steps": 5} for name in ("deletion", "insertion", "irof")},
    **{name: {"steps": 3} for name in ("srg", "r_oms")},
    "saco": {"groups": 4},
    "single_deletion": {"patches": 2},
    "infidelity": {"samples": 4},
    "sensitivity_n": {"samples": 2, "sizes": 2},
}
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "evaluation.py"


@pytest.mark.slow
def test_a_metric_takes_at_most_a_third_more_than_its_passes():
    from dave_vit import load_model

    spec = importlib.util.spec_from_file_location("evaluation", SCRIPT)
    evaluation = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = evaluation  # dataclasses look their module up
    spec.loader.exec_module(evaluation)
    model = load_model("timm:deit_tiny_patch16_224", "random")
    inputs = torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    # Fewer passes than usual make what comes beside them count more; road solves linear equations beside its own.
    few = {name: FEWER.get(name, {}) for name in METRICS if name not in ("road", "sanity")}
    costs = evaluation.measure(model, inputs[:1], 3, few)
    costs += evaluation.measure(model, inputs, 2, {"sanity": {}})  # copies the model once per batch
    print(evaluation.table(costs))
    assert {cost.metric: round(cost.ratio, 2) for cost in costs if cost.ratio > 1.3} == {}
