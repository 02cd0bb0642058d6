"""The rule set of the effective transformation (METHOD: eq. (3), appendix A)."""

from __future__ import annotations

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.operators import OPERATORS
from dave_vit.engine.rules.activations import GateRule

EFFECTIVE = RuleSet("effective", {name: entry.rule for name, entry in OPERATORS.items() if entry.rule is not None})
"""Every operator frozen: DAVE's effective transformation."""

OFFICIAL_GATE = EFFECTIVE.extend("effective, GELU gate 1 at zero", {"gelu": GateRule(1.0)})
"""As the authors' public code has it: the GELU gate at x = 0 is 1 instead of its limit 0.5."""
