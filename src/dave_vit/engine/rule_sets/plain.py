"""Ordinary gradients."""

from __future__ import annotations

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.rules import norms

PLAIN = RuleSet("plain", {"batch_norm": norms.batch_norm}, strict=False)
"""Nothing frozen; batch normalisation has its derivative written out (see there)."""
