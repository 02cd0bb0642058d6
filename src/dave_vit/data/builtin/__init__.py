"""The embedded benchmark: composed images with exact object masks."""

from dave_vit.data.builtin.scenes import CLASS_NAMES, Scene, compose_edited_scene, compose_scene

__all__ = ["CLASS_NAMES", "Scene", "compose_edited_scene", "compose_scene"]
