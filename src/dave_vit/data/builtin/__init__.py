"""The embedded benchmark: composed images with exact object masks."""

from __future__ import annotations

from dave_vit.data.builtin.scenes import (
    CLASS_NAMES,
    DISTRACTOR_NAMES,
    Scene,
    SceneObject,
    compose_edited_scene,
    compose_scene,
)
from dave_vit.data.builtin.sprites import FAMILIES

__all__ = [
    "CLASS_NAMES",
    "DISTRACTOR_NAMES",
    "FAMILIES",
    "Scene",
    "SceneObject",
    "compose_edited_scene",
    "compose_scene",
]
