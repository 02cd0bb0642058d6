"""Models: loaded by a spec, with preprocessing and class names."""

from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.loading import load_model
from dave_vit.run.layout import TokenLayout, token_layout

__all__ = ["Adapter", "Preprocessing", "TokenLayout", "load_model", "token_layout"]
