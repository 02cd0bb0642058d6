"""The embedded benchmark: composed images with exact object masks."""

from __future__ import annotations

from dave_vit.data.builtin.dataset import CLASS_NAMES, DISTRACTOR_NAMES, BuiltinDataset, Scene, SceneObject
from dave_vit.data.builtin.sprites import FAMILIES

__all__ = ["CLASS_NAMES", "DISTRACTOR_NAMES", "FAMILIES", "BuiltinDataset", "Scene", "SceneObject"]
