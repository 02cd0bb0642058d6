"""The interception layer: the mode, the states of tensors, calls and rule sets."""

from dave_vit.intercept.calls import Call, Rule, RuleSet
from dave_vit.intercept.mode import Interception
from dave_vit.intercept.surrogate import carry

__all__ = ["Call", "Interception", "Rule", "RuleSet", "carry"]
