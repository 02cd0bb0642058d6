"""Engines: where the tasks of a run are computed. One file each, which registers itself."""

from dave_vit._internal.registry import import_all
from dave_vit.evaluate.engines.base import ENGINES, Engine, EngineOptions, create_engine

__all__ = ["ENGINES", "Engine", "EngineOptions", "create_engine"]

import_all(__name__)
