"""The interception layer and the effective transformation."""

from dave_vit.effective.attention import attention_matrix
from dave_vit.effective.intercept import Interception
from dave_vit.effective.ruleset import Call, Rule, RuleSet
from dave_vit.effective.sets import EFFECTIVE, OFFICIAL_GATE, PLAIN
from dave_vit.effective.surrogate import carry
from dave_vit.effective.targets import Target, resolve_target
from dave_vit.effective.transform import Gradient, conservation_gap, effective_transformation, gradient

__all__ = [
    "EFFECTIVE",
    "OFFICIAL_GATE",
    "PLAIN",
    "Call",
    "Gradient",
    "Interception",
    "Rule",
    "RuleSet",
    "Target",
    "attention_matrix",
    "carry",
    "conservation_gap",
    "effective_transformation",
    "gradient",
    "resolve_target",
]
