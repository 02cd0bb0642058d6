"""The engine: a model under a rule set, its derivative, and the checks that the derivative is exact."""

from dave_vit._internal.registry import import_all
from dave_vit.engine.calls import Call, RuleSet, carry
from dave_vit.engine.gradient import gradient
from dave_vit.engine.interception import Interception
from dave_vit.engine.rule_sets import EFFECTIVE, PLAIN
from dave_vit.engine.targets import Target

__all__ = ["EFFECTIVE", "PLAIN", "Call", "Interception", "RuleSet", "Target", "carry", "gradient"]

import_all("dave_vit.engine.fast")  # each module registers its substitutes
