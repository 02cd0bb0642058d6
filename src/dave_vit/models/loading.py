"""One door to all model families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from dave_vit.errors import OptionError, UnknownName
from dave_vit.models.adapter import Adapter
from dave_vit.models.classes import Classes
from dave_vit.registry import nearest

_MODULES = {
    "builtin": "builtin",
    "timm": "timm",
    "hf": "hf",
    "torchvision": "torchvision",
    "openclip": "open_clip",
    "bcos": "bcos",
}
FAMILIES = tuple(_MODULES)
_TIMM_SOURCES = ("hf-hub", "hf_hub", "local-dir")  # timm's own prefixes


def load_model(
    spec: str = "builtin",
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    *,
    classes: Classes | None = None,
    prompts: Sequence[str] | None = None,
) -> Adapter:
    """A model with its preprocessing and class names.

    Args:
        spec: "builtin", "timm:NAME" (a bare name means timm), "hf:NAME_OR_FOLDER", "torchvision:NAME",
            "openclip:NAME" or "bcos:NAME".
        weights: a local .safetensors or .pth file instead of a download, or "random" for none at all.
        device: where the model is put; the CPU where nothing is said.
        classes: a file of class names (text, one a line, or JSON), or the names themselves.
        prompts: sentences that become the classes of a zero-shot classifier (CLIP, SigLIP).

    Returns:
        A module in evaluation mode that maps preprocessed inputs ``[B, C, H, W]`` to logits; ``.preprocess`` turns a
        picture or its path into such an input, ``.class_names`` names the logits.

    Example:
        >>> model = load_model("timm:vit_base_patch16_224")
        >>> logits = model(model.preprocess("cat.jpg"))
    """
    family, name = parse_spec(spec)
    if prompts is not None and family not in ("hf", "openclip"):
        raise OptionError(f"prompts make a zero-shot classifier of hf: and openclip: models; {spec!r} is neither")
    source = str(weights) if weights is not None else None
    adapter = _loader(family, prompts)(name, source, classes)
    return adapter.to(checked_device(device)) if device is not None else adapter


def parse_spec(spec: str) -> tuple[str, str]:
    """Family and name of a spec; a bare name is timm's."""
    family, colon, name = spec.partition(":")
    if family.startswith("builtin") and not name:
        return "builtin", family
    if not colon or family in _TIMM_SOURCES:
        return "timm", spec
    if family not in FAMILIES:
        hint = nearest(family, list(FAMILIES)) or f"; known: {', '.join(FAMILIES)}"
        raise UnknownName(f"unknown model family {family!r} in {spec!r}{hint}")
    if not name:
        raise OptionError(f"model spec {spec!r} names no model; write {family}:NAME")
    return family, name


def _loader(family: str, prompts: Sequence[str] | None) -> Callable[[str, str | None, Classes | None], Adapter]:
    # Imported one by one: each family needs a library of its own, and most users have only some of them.
    if family in ("hf", "openclip"):
        module = import_module(f"dave_vit.models.families.{_MODULES[family]}")
        return partial(module.load, prompts=prompts)
    load: Callable[[str, str | None, Classes | None], Adapter] = import_module(
        f"dave_vit.models.families.{_MODULES[family]}"
    ).load
    return load


def backbone(spec: str, weights: str | None, names: Sequence[str]) -> tuple[Adapter, str]:
    """A model with an untrained head for these classes, and the path of that head inside of ``.model``."""
    family, name = parse_spec(spec)
    if family not in ("timm", "hf"):
        raise OptionError(f"{spec!r} cannot be probed; timm: and hf: models can")
    module = import_module(f"dave_vit.models.families.{_MODULES[family]}")
    model, head = module.backbone(name, weights, names)
    return model, str(head)


def checked_device(device: str | torch.device) -> torch.device:
    """A device that exists on this machine."""
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {str(device)!r} is not available on this machine; use cpu") from error
    return chosen
