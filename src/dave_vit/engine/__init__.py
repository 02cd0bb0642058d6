"""The engine: a model under a rule set, its derivative, and the checks that the derivative is exact."""

from dave_vit._internal.registry import import_all
from dave_vit.engine.calls import Call, Rule, RuleSet, carry
from dave_vit.engine.gradient import Gradient, effective_transformation, gradient
from dave_vit.engine.interception import Interception
from dave_vit.engine.rule_sets import EFFECTIVE, OFFICIAL_GATE, PLAIN
from dave_vit.engine.rules.attention import attention_matrix
from dave_vit.engine.targets import Contrast, Score, Target, TargetLike, class_logits, class_names

__all__ = [
    "EFFECTIVE",
    "OFFICIAL_GATE",
    "PLAIN",
    "Call",
    "Contrast",
    "Gradient",
    "Interception",
    "Rule",
    "RuleSet",
    "Score",
    "Target",
    "TargetLike",
    "attention_matrix",
    "carry",
    "class_logits",
    "class_names",
    "effective_transformation",
    "gradient",
]

import_all("dave_vit.engine.fast")  # each module registers its substitutes
