"""Names that this module held before its rooms were drawn anew; each warns once and says where it is now."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_HOMES = {
    **dict.fromkeys(["EFFECTIVE", "OFFICIAL_GATE", "PLAIN", "attention_matrix"], "rules"),
    **dict.fromkeys(["Call", "Interception", "Rule", "RuleSet", "carry"], "intercept"),
    **dict.fromkeys(["Gradient", "effective_transformation", "gradient"], "run"),
    **dict.fromkeys(["Target", "resolve_target"], "targets"),
    "conservation_gap": "conserve",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"dave_vit.{_HOMES[name]}"
    warnings.warn(f"dave_vit.effective.{name} is now {home}.{name}", DeprecationWarning, stacklevel=2)
    globals()[name] = getattr(importlib.import_module(home), name)  # so that it is not asked for again
    return globals()[name]
