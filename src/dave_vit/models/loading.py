"""Load a model of any family by its spec."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dave_vit.engine.fingerprint import is_packed
from dave_vit.engine.rules.gamma import dense
from dave_vit.errors import ModelError, OptionError, OutOfMemory, is_out_of_memory, quantization_error
from dave_vit.models.adapter import Adapter, Classes, Preprocessing
from dave_vit.models.families import FAMILIES, hf, timm
from dave_vit.models.prepare import Prepare


@dataclass(frozen=True)
class ModelSpec:
    """A model to load; the fields are arguments of `load_model`."""

    spec: str = "builtin"
    weights: str | None = None
    classes: str | None = None
    prepare: Prepare | None = None

    def load(self, device: str | torch.device | None = None) -> Adapter:
        """Load the model."""
        return load_model(self.spec, self.weights, device, classes=self.classes, prepare=self.prepare)


def load_model(
    spec: str = "builtin",
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    *,
    classes: Classes | None = None,
    prompts: Sequence[str] | None = None,
    prepare: Prepare | None = None,
) -> Adapter:
    """Load a model with its preprocessing and class names.

    Args:
        spec: "builtin", "timm:NAME" (a bare name means timm), "hf:NAME_OR_FOLDER", "torchvision:NAME",
            "openclip:NAME", "bcos:NAME", or "FILE.py:FUNCTION", a function of yours that returns a model.
        weights: a local .safetensors or .pth file instead of a download, or "random" for none at all.
        device: of the model; the CPU by default.
        classes: a file of class names (text, one a line, or JSON), or the names themselves.
        prompts: sentences that become the classes of a zero-shot classifier (CLIP, SigLIP).
        prepare: options that replace parts of the model's preprocessing.

    Returns:
        A module in evaluation mode that maps preprocessed inputs ``[B, C, H, W]`` to logits; ``.preprocess`` turns an
        image or its path into such an input, ``.class_names`` names the logits.

    Example:
        >>> model = load_model("timm:vit_base_patch16_224")
        >>> logits = model(model.preprocess("cat.jpg"))
    """
    kind, name = parse_spec(spec)
    family = FAMILIES[kind]
    if prompts is not None and not family.takes("prompts"):
        families = _names(other for other in FAMILIES if FAMILIES[other].takes("prompts"))
        raise OptionError(f"prompts make a zero-shot classifier of {families} models; {spec!r} is none of them")
    source = str(weights) if weights is not None else None
    options: dict[str, Any] = {} if prompts is None else {"prompts": prompts}
    if prepare is not None and family.takes("prepare"):
        options["prepare"] = prepare
    where = resolve_device(device) if device is not None else None  # before a download
    adapter = family.load(name, source, classes, **options)
    _check_finite(adapter, source or spec)
    if prepare is not None:
        adapter.preprocessing, adapter.prepare = prepare.of(adapter.preprocessing), prepare
    return adapter.to(where) if where is not None else adapter


def _check_finite(model: Adapter, source: str) -> None:
    """Raise ModelError for weights that would make every map NaN, or that are packed in layers of bitsandbytes."""
    if any(map(is_packed, model.modules())):
        raise quantization_error()
    for name, parameter in model.model.named_parameters():
        if not dense(parameter).isfinite().all():
            raise ModelError(f"{source}: weight {name!r} holds NaN or infinity; download or save the file again")


def parse_spec(spec: str) -> tuple[str, str]:
    """Return family and name of a spec; a bare name is a timm model."""
    family, colon, name = spec.partition(":")
    if re.fullmatch(r".+\.py:\w+", spec):
        return "module", spec
    if family.startswith("builtin") and not name:
        return "builtin", family
    if not colon or family in ("hf-hub", "hf_hub", "local-dir"):  # timm's own prefixes
        return "timm", spec
    if family in FAMILIES and not name:
        raise OptionError(f"model spec {spec!r} names no model; write {FAMILIES[family].form or f'{family}:NAME'}")
    return family, name


def backbone(spec: str, weights: str | None, names: Sequence[str]) -> tuple[Adapter, str]:
    """Return a model with an untrained head for these classes, and the path of that head inside of ``.model``."""
    kind, name = parse_spec(spec)
    make = FAMILIES[kind].backbone
    if make is None:
        families = _names(other for other in FAMILIES if FAMILIES[other].backbone)
        raise OptionError(f"{spec!r} cannot be probed; {families} models can")
    return make(name, weights, names)


def _names(families: Iterable[str]) -> str:
    """Return families for a message, the default first."""
    return " and ".join(f"{name}:" for name in sorted(families, key=lambda name: name != "timm"))


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a device after a test computation on it."""
    try:
        resolved = torch.device(device)
        torch.ones(1, device=resolved).item()
    except Exception as error:  # each backend raises its own exception
        if is_out_of_memory(error):
            raise OutOfMemory(f"device {str(device)!r} is full; free its memory, or use another device") from error
        raise OptionError(f"device {str(device)!r} is not available on this machine; use cpu") from error
    return resolved


def find_preprocessing(model: nn.Module, processor: Any = None) -> Preprocessing | None:
    """Return how pictures become inputs of a model, or None where that is not known.

    Args:
        model: from `load_model`, or any module; a timm model has its preprocessing in its configuration.
        processor: a processor of transformers, or a function from a PIL image to a tensor ``[C, H, W]``.
    """
    if processor is None and isinstance(model, Adapter):
        return model.preprocessing
    if processor is None:
        return timm.preprocessing(model) if getattr(model, "pretrained_cfg", None) else None
    if hasattr(processor, "model_input_names"):  # of transformers: an image processor, or one with a tokenizer
        return hf.preprocessing(getattr(processor, "image_processor", processor))
    if not callable(processor):
        raise OptionError(
            f"processor is of type {type(processor).__name__}; give a processor of transformers, or a function from a "
            "PIL image to a tensor"
        )
    return Preprocessing.of_transform(processor)
