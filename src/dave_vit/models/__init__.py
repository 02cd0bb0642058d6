"""Models: load them by a spec, with preprocessing and class names."""

from dave_vit.models.adapter import Adapter, Preprocessing, Traits, traits_of
from dave_vit.models.inputs import with_embeddings, with_inputs
from dave_vit.models.loading import ModelSpec, load_model
from dave_vit.models.prepare import Prepare

__all__ = [
    "Adapter",
    "ModelSpec",
    "Prepare",
    "Preprocessing",
    "Traits",
    "load_model",
    "traits_of",
    "with_embeddings",
    "with_inputs",
]
