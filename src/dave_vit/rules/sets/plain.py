"""Ordinary gradients."""

from __future__ import annotations

from dave_vit.intercept.calls import RuleSet
from dave_vit.rules import norms

PLAIN = RuleSet("plain", {"batch_norm": norms.batch_norm}, strict=False)
"""Nothing held; batch normalisation has its derivative written out (see there)."""
