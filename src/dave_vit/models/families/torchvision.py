"""torchvision: its image classifiers, with the transform and the categories of their published weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from dave_vit.errors import UnknownName
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.classes import Classes, class_names
from dave_vit.models.hub import hub_access
from dave_vit.models.state import RANDOM, classes_in, load_state, read_weights
from dave_vit.registry import nearest

_PUBLISHED = "https://download.pytorch.org"


def load(name: str, weights: str | None = None, classes: Classes | None = None) -> Adapter:
    """A torchvision classifier by its name, such as ``vit_b_16``.

    Args:
        name: as torchvision spells it.
        weights: a local file, "random", or None for the published weights.
        classes: names of the classes, or a file of them.
    """
    from torchvision.models import get_model_weights

    published = get_model_weights(check_name(name)).DEFAULT
    count = len(published.meta["categories"])
    if weights is None:
        with hub_access(f"torchvision:{name}", _PUBLISHED):
            model = build(name, weights=published)
    else:
        model = build(name)
    if weights not in (None, RANDOM):
        found = read_weights(str(weights))
        count = classes_in(found, model, count)
        model = build(name, num_classes=count)
        load_state(model, found)
    return wrap(model, published.transforms(), count, classes, spec=f"torchvision:{name}")


def wrap(model: nn.Module, transform: Any, count: int, classes: Classes | None, *, spec: str) -> Adapter:
    """A classifier with a transform of torchvision's."""
    preprocessing = Preprocessing(transform, tuple(transform.mean), tuple(transform.std))
    return Adapter(model, preprocessing, class_names(count, classes), spec=spec)


def names() -> list[str]:
    """All classifiers of torchvision."""
    from torchvision import models

    return [str(name) for name in models.list_models(module=models)]


def check_name(name: str) -> str:
    """A name that torchvision knows."""
    if name not in names():
        raise UnknownName(f"torchvision has no classifier {name!r}{nearest(name, names())}")
    return name


def build(name: str, **options: Any) -> nn.Module:
    """The architecture; without options it is initialised at random."""
    from torchvision.models import get_model

    if name in ("googlenet", "inception_v3") and "weights" not in options:
        options |= {"init_weights": False, "aux_logits": True}  # as their published weights have it, and quickly
    model: nn.Module = get_model(name, **options)
    return model
