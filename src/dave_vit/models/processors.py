"""Find the preprocessing of a model that the user has loaded."""

from __future__ import annotations

from typing import Any

from torch import nn

from dave_vit.errors import OptionError
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.families import hf, timm


def find_preprocessing(model: nn.Module, processor: Any = None) -> Preprocessing | None:
    """Return how pictures become inputs of a model, or None where that is not known.

    Args:
        model: from `load_model`, or any module; a timm model has its preprocessing in its configuration.
        processor: a processor of transformers, or a function from a PIL image to a tensor ``[C, H, W]``.
    """
    if processor is not None:
        return _of_processor(processor)
    if isinstance(model, Adapter):
        return model.preprocessing
    return timm.preprocessing(model) if getattr(model, "pretrained_cfg", None) else None


def _of_processor(processor: Any) -> Preprocessing:
    if hasattr(processor, "model_input_names"):  # of transformers: an image processor, or one with a tokenizer
        return hf.preprocessing(getattr(processor, "image_processor", processor))
    if not callable(processor):
        raise OptionError(
            f"processor is of type {type(processor).__name__}; give a processor of transformers, or a function from a "
            "PIL image to a tensor"
        )
    steps = getattr(processor, "transforms", None) or [processor]
    scaling = next((step for step in steps if hasattr(step, "mean") and hasattr(step, "std")), None)
    return Preprocessing(processor, *((tuple(scaling.mean), tuple(scaling.std)) if scaling else ()))
