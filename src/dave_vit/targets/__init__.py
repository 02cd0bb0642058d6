"""What is explained of a model's output."""

from __future__ import annotations

from dave_vit.targets.target import Contrast, Score, Target, TargetLike, class_logits, names_of, resolve_target

__all__ = ["Contrast", "Score", "Target", "TargetLike", "class_logits", "names_of", "resolve_target"]
