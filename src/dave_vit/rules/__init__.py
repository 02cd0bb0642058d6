"""Rules by what they say of a function, and the rule sets made of them."""

from dave_vit.rules.attention import attention_matrix
from dave_vit.rules.sets.effective import EFFECTIVE, OFFICIAL_GATE, THROUGH_DETACH
from dave_vit.rules.sets.plain import PLAIN

__all__ = ["EFFECTIVE", "OFFICIAL_GATE", "PLAIN", "THROUGH_DETACH", "attention_matrix"]
