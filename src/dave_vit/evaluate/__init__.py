"""Runs: a plan is cut into tasks, tasks give rows, rows give a summary and a report."""

from dave_vit.evaluate.engines import create_engine
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import MethodEntry, MetricEntry, ModelEntry, Smoothing
from dave_vit.evaluate.run import evaluate

__all__ = ["MethodEntry", "MetricEntry", "ModelEntry", "Plan", "Smoothing", "create_engine", "evaluate"]
