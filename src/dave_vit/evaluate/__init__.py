"""Runs: a plan is cut into tasks, tasks give rows, rows give a summary and a report."""

from dave_vit.evaluate.engines import ENGINES, create_engine
from dave_vit.evaluate.engines.local import LocalEngine, pick_devices
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import MethodEntry, MetricEntry, ModelEntry, Smoothing
from dave_vit.evaluate.run import evaluate

__all__ = [
    "ENGINES",
    "LocalEngine",
    "MethodEntry",
    "MetricEntry",
    "ModelEntry",
    "Plan",
    "Smoothing",
    "create_engine",
    "evaluate",
    "pick_devices",
]
