"""timm: its image models, with their preprocessing and class names."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dave_vit._internal.registry import suggest_names
from dave_vit.errors import ModelError, UnknownName
from dave_vit.models.adapter import Adapter, Classes, Preprocessing, Traits, class_names, square_side
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.state import RANDOM, Weights, hub_access, read_weights

_CLASSES = 1000  # of a head that is built to find its name, where the published model has none


def load(name: str, weights: str | None = None, classes: Classes | None = None) -> Adapter:
    """Load a timm model by its name.

    Args:
        name: as timm spells it, with or without a tag; ``hf-hub:`` names are passed on.
        weights: a local file, "random", or None for the published weights.
        classes: names of the classes, or a file of them.
    """
    check_name(name)
    model: nn.Module | None = None
    known: list[str] | None = None
    if weights not in (None, RANDOM):
        file = read_weights(str(weights))
        model, known = from_weights(name, file), file.class_names
    elif _published_classes(name) != 0:  # known before a long download
        model = _build_without_file(name, weights)
    if model is None or not getattr(model, "num_classes", 0):
        raise ModelError(
            f"timm:{name} has no class head; train one with `dave probe`, or give weights with one (--weights FILE)"
        )
    return wrap(model, classes, known, spec=f"timm:{name}")


def wrap(model: nn.Module, classes: Classes | None, known: Sequence[str] | None, *, spec: str) -> Adapter:
    """Return the adapter of a timm model."""
    count = int(model.num_classes)  # type: ignore[arg-type]
    config = getattr(model, "pretrained_cfg", None) or {}
    names = class_names(count, classes, known=known or _config_class_names(model, config, count))
    patch = square_side(getattr(getattr(model, "patch_embed", None), "patch_size", None))
    # A head of another size was trained by somebody else, with an unknown loss.
    traits = Traits(patch=patch, compete=True if count == config.get("num_classes") else None)
    return Adapter(model, preprocessing(model), names, spec=spec, traits=traits)


def _config_class_names(model: nn.Module, config: dict[str, Any], count: int) -> list[str] | None:
    """Return class names of the model's configuration, or of the ImageNet subset that it was trained on."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    labels = config.get("label_names")
    if labels and len(labels) == count:
        descriptions = config.get("label_descriptions") or {}
        return [str(descriptions.get(name, name)) for name in labels]
    subset = None if count == 1000 else infer_imagenet_subset(model)
    info = ImageNetInfo(subset) if subset else None
    if info is None or info.num_classes() != count:
        return None
    return [info.index_to_description(index).split(",")[0] for index in range(count)]


def preprocessing(model: nn.Module) -> Preprocessing:
    """Return the preprocessing of the model's configuration."""
    from timm.data import create_transform, resolve_model_data_config

    config = resolve_model_data_config(model)
    return Preprocessing(create_transform(**config, is_training=False), tuple(config["mean"]), tuple(config["std"]))


def check_name(name: str) -> None:
    """Raise UnknownName for a name that timm does not know."""
    import timm

    base, _, tag = name.partition(".")
    if name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        return
    if not timm.is_model(base):
        raise UnknownName(f"timm has no model {base!r}{_suggest_spec(name) or suggest_names(base, timm.list_models())}")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise UnknownName(f"timm's {base} has no tag {tag!r}; it has {', '.join(filter(None, tags)) or 'none'}")


def _suggest_spec(name: str) -> str:
    """Suggest the spec for a name that is one of the user's files or folders."""
    path = Path(name).expanduser()
    if path.is_dir():
        return f"; {name} is a folder: write --model hf:{name} if a model of transformers is saved in it"
    if path.is_file() and path.suffix == ".py":
        return f"; {name} is a module: write --model {name}:FUNCTION, a function in it that makes the model"
    return f"; {name} is a file: write --model NAME --weights {name} if it holds weights" if path.is_file() else ""


def build(name: str, **options: Any) -> nn.Module:
    """Build the architecture; plain ViTs take images of any size."""
    import timm

    try:
        model: nn.Module = timm.create_model(name, dynamic_img_size=True, **options)
    except TypeError as error:
        if "dynamic_img_size" not in str(error):
            raise
        model = timm.create_model(name, **options)
    return model


def _build_without_file(name: str, weights: str | None, **options: Any) -> nn.Module:
    """Build the architecture with its published weights, or with random ones."""
    if weights == RANDOM:
        return build(name, **options)
    try:
        with hub_access(f"timm:{name}"):
            return build(name, pretrained=True, **options)
    except RuntimeError as error:
        if "No pretrained weights" not in str(error):
            raise
        raise ModelError(f"timm:{name} has no published weights; give a local file with --weights FILE") from error


def from_weights(name: str, weights: Weights) -> nn.Module:
    """Build the architecture with the weights of a file; the head takes as many classes as they have."""
    saved = weights.metadata.get("architecture", name)
    if saved.partition(".")[0] != name.partition(".")[0]:
        raise ModelError(f"{weights.path}: these weights are of timm:{saved}, not timm:{name}; load them by that name")
    published = _published_classes(name)
    tried = published or _CLASSES
    model = build(name, num_classes=tried)
    count = weights.count_classes(model, tried)
    if count is None and published:
        raise ModelError(f"{weights.path}: these weights hold no class head; train one with `dave probe`")
    return _load_state(name, model if count == tried else build(name, num_classes=count or 0), weights)


def backbone(name: str, weights: str | None, names: Sequence[str]) -> tuple[Adapter, str]:
    """Return a model with an untrained head, and the path of that head; the head of the file is left out."""
    check_name(name)
    if weights is None or weights == RANDOM:
        model = _build_without_file(name, weights, num_classes=0)
    else:
        file = read_weights(weights)
        whole = build(name, num_classes=_CLASSES)
        heads = file.head_tensors(whole, _CLASSES)
        bodies = {key: value for key, value in file.state_for(whole).items() if key not in heads}
        model = _load_state(name, build(name, num_classes=0), replace(file, state=bodies))
    model.reset_classifier(len(names))  # type: ignore[operator]
    head = model.get_classifier()  # type: ignore[operator]
    path = next((path for path, module in model.named_modules() if module is head), None)
    if path is None or not isinstance(head, nn.Linear):
        raise ModelError(f"timm:{name} has no single linear head, so it cannot be probed; choose another model")
    return wrap(model, names, None, spec=f"timm:{name}"), path


def _published_classes(name: str) -> int | None:
    import timm

    return getattr(timm.get_pretrained_cfg(name), "num_classes", None)


def _load_state(name: str, model: nn.Module, weights: Weights) -> nn.Module:
    """Load weights into a model, or build it anew with weights that timm has to convert."""
    if weights.fits(model):
        weights.load_into(model)
        return model
    # timm converts checkpoints in the layout of their first authors, and other image sizes.
    options = {"num_classes": model.num_classes}
    overlay = {"state_dict": weights.state_for(model), "custom_load": False, "label_offset": 0, **options}
    try:
        return build(name, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    except (RuntimeError, KeyError, ValueError, AttributeError) as error:
        raise weights.mismatch_error(model) from error


FAMILIES.register("timm")(Family(load, "timm:NAME (or just NAME)", "image classifiers of timm", backbone=backbone))
