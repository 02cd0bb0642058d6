"""dave-vit: what a Vision Transformer saw."""

from dave_vit._version import __version__
from dave_vit.effective import conservation_gap, effective_transformation
from dave_vit.methods import DAVE, METHODS, create_method

__all__ = [
    "DAVE",
    "METHODS",
    "__version__",
    "conservation_gap",
    "create_method",
    "effective_transformation",
]
