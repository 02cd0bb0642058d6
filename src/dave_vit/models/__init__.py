"""Models: load them by a spec, with preprocessing and class names."""

from dave_vit.engine.observation import TokenLayout, find_token_layout
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.inputs import ImageTokens, PackedPatches, WithInputs, with_embeddings, with_inputs
from dave_vit.models.loading import ModelSpec, load_model
from dave_vit.models.prepare import Prepare
from dave_vit.models.traits import Traits, traits_of

__all__ = [
    "Adapter",
    "ImageTokens",
    "ModelSpec",
    "PackedPatches",
    "Prepare",
    "Preprocessing",
    "TokenLayout",
    "Traits",
    "WithInputs",
    "find_token_layout",
    "load_model",
    "traits_of",
    "with_embeddings",
    "with_inputs",
]
