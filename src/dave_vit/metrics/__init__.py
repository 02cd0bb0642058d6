"""Scores of maps: pure functions on tensors, wrapped in thin classes. A metric never computes a map by itself."""

from dave_vit.metrics.base import METRICS, Case, GridMetric, Metric, Scores, create_metric
from dave_vit.metrics.localization import average_precision, energypg, gridpg, pointing

# isort: split  # imported in the order in which tables show them
from dave_vit.metrics.perturbation import Perturbation, area, deletion, insertion, protocol

# isort: split
from dave_vit.metrics.regions import region_deletion

# isort: split
from dave_vit.metrics.road import impute, road

# isort: split
from dave_vit.metrics.relevance_gain import relevance_gain

# isort: split
from dave_vit.metrics.saco import saco

# isort: split
from dave_vit.metrics.fidelity import infidelity, sensitivity

# isort: split
from dave_vit._internal.registry import import_all
from dave_vit.metrics.consistency import consistency, small_warp
from dave_vit.metrics.sanity import cascade, similarity
from dave_vit.metrics.sparseness import complexity, sparseness

__all__ = [
    "METRICS",
    "Case",
    "GridMetric",
    "Metric",
    "Perturbation",
    "Scores",
    "area",
    "average_precision",
    "cascade",
    "complexity",
    "consistency",
    "create_metric",
    "deletion",
    "energypg",
    "gridpg",
    "impute",
    "infidelity",
    "insertion",
    "pointing",
    "protocol",
    "region_deletion",
    "relevance_gain",
    "road",
    "saco",
    "sensitivity",
    "similarity",
    "small_warp",
    "sparseness",
]

import_all(__name__)  # registers the metrics of every other file of this package
