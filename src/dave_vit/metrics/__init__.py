"""Scores of maps: pure functions on tensors, wrapped in thin classes. A metric never computes a map by itself."""

from dave_vit._internal.registry import import_all
from dave_vit.metrics.base import METRICS, Case, GridMetric, Metric, Scores, create_metric
from dave_vit.metrics.localization import energypg, gridpg, pointing
from dave_vit.metrics.perturbation import Perturbation, area, deletion, insertion
from dave_vit.metrics.stability import consistency

__all__ = [
    "METRICS",
    "Case",
    "GridMetric",
    "Metric",
    "Perturbation",
    "Scores",
    "area",
    "consistency",
    "create_metric",
    "deletion",
    "energypg",
    "gridpg",
    "insertion",
    "pointing",
]

import_all(__name__)  # registers the metrics of every other file of this package

# The order in which tables show them, whatever files they are in.
METRICS.arrange(
    """gridpg energypg pointing average_precision
    deletion insertion irof road srg r_oms saco
    consistency infidelity sensitivity_n single_deletion
    sanity random_logit complexity sparseness"""
)
