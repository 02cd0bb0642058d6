"""Engines: who computes the tasks of a run. One file each, which registers itself."""

from dave_vit.bench.engines.base import ENGINES, Engine, EngineOptions, create_engine
from dave_vit.registry import import_all

__all__ = ["ENGINES", "Engine", "EngineOptions", "create_engine"]

import_all(__name__)
