"""Audits: what a model relies on over a whole data set.

Evidence of all images is collected by the engines of `dave_vit.evaluate`, clustered in each class, and every cluster is
tested on the model: nothing is claimed from maps alone.
"""

from dave_vit.audit.findings import Audit, AuditOptions, Finding
from dave_vit.audit.run import run_audit

__all__ = ["Audit", "AuditOptions", "Finding", "run_audit"]
