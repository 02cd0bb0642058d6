"""dave-vit: what a Vision Transformer saw.

Example:
    >>> import dave_vit
    >>> dave_vit.explain("picture.png").save("map.png")
    >>> model = dave_vit.load_model("builtin")
    >>> attribution = dave_vit.DAVE(model).attribute(model.preprocess("picture.png"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dave_vit._version import __version__

if TYPE_CHECKING:
    from dave_vit.analysis.tuning import tune
    from dave_vit.engine import scores
    from dave_vit.engine.gradient import conservation_gap, effective_transformation
    from dave_vit.engine.targets import Contrast
    from dave_vit.explanations.api import explain, pipeline
    from dave_vit.methods import DAVE, METHODS, Explanation, create_method
    from dave_vit.models import load_model, with_inputs

__all__ = [
    "DAVE",
    "METHODS",
    "Contrast",
    "Explanation",
    "__version__",
    "conservation_gap",
    "create_method",
    "effective_transformation",
    "explain",
    "load_model",
    "pipeline",
    "scores",
    "tune",
    "with_inputs",
]

# Imported when first asked for, so that the command line answers --help without waiting for torch.
_HOMES = {
    **dict.fromkeys(["DAVE", "METHODS", "Explanation", "create_method"], "methods"),
    **dict.fromkeys(["explain", "pipeline"], "explanations.api"),
    **dict.fromkeys(["load_model", "with_inputs"], "models"),
    **dict.fromkeys(["conservation_gap", "effective_transformation"], "engine.gradient"),
    "scores": "engine.scores",
    "Contrast": "engine.targets",
    "tune": "analysis.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOMES[name]}")
    value = home if _HOMES[name].endswith(f".{name}") else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
