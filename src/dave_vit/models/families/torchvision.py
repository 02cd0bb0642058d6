"""torchvision: its image classifiers, with the transform and the categories of their published weights."""

from functools import partial
from typing import Any

from torch import nn

from dave_vit._internal.registry import suggest_names
from dave_vit.errors import UnknownName
from dave_vit.models.adapter import Adapter, Classes, Preprocessing, Traits, class_names
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.state import build_with_weights, hub_access

_HOST = "https://download.pytorch.org"


def load(name: str, weights: str | None = None, classes: Classes | None = None) -> Adapter:
    """Load a torchvision classifier by its name, such as ``vit_b_16``.

    Args:
        name: as torchvision spells it.
        weights: a local file, "random", or None for the published weights.
        classes: names of the classes, or a file of them.
    """
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise UnknownName(f"torchvision has no classifier {name!r}{suggest_names(name, known)}")
    published = models.get_model_weights(name).DEFAULT
    own = count = len(published.meta["categories"])
    if weights is None:
        with hub_access(f"torchvision:{name}", _HOST):
            model = build(name, weights=published)
    else:
        model, count = build_with_weights(partial(build, name), weights, own)
    preprocessing = Preprocessing.of_transform(published.transforms())
    # A head of another size was trained by somebody else, with an unknown loss.
    traits = Traits(patch=getattr(model, "patch_size", None), compete=True if count == own else None)
    return Adapter(model, preprocessing, class_names(count, classes), spec=f"torchvision:{name}", traits=traits)


def build(name: str, **options: Any) -> nn.Module:
    """Build the architecture; without options it is initialised at random."""
    from torchvision.models import get_model

    if name in ("googlenet", "inception_v3") and "weights" not in options:
        options |= {"init_weights": False, "aux_logits": True}  # as their published weights have it, and quickly
    return get_model(name, **options)  # type: ignore[no-any-return]


FAMILIES.register("torchvision")(Family(load, "torchvision:NAME", "image classifiers of torchvision"))
