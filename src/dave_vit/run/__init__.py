"""A model under a rule set: its derivative, also compiled, and what can be seen on the way."""

from dave_vit.run.gradient import Gradient, effective_transformation, gradient

__all__ = ["Gradient", "effective_transformation", "gradient"]
