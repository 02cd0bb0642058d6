"""B-cos networks of the ``bcos`` package; their inputs are colours and complements."""

from functools import partial
from typing import Any

from torch import nn

from dave_vit._internal.registry import suggest_names
from dave_vit.errors import UnknownName, import_optional
from dave_vit.models.adapter import Adapter, Classes, Preprocessing, Traits, class_names
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.state import build_with_weights, hub_access
from dave_vit.neighborhood import Noise

BCOS_NOISE = Noise("additive", 0.2)
"""The noise that the paper uses for B-cos networks (appendix D.2)."""
BCOS = Traits(BCOS_NOISE, fill=0.5, compete=False)
"""Channels are colours and their complements, so that half is the grey one; training is with sigmoids."""

_HOST = "https://github.com"
_STANDARD = "standard_"  # the package's plain counterparts of its B-cos networks, trained with softmax
_CLASSES = 1000  # of all published networks


def load(name: str, weights: str | None = None, classes: Classes | None = None) -> Adapter:
    """Load a network of the package by its name, such as ``simple_vit_b_patch16_224`` or ``vitc_b_patch1_14``.

    Args:
        name: as the package spells it.
        weights: a local file, "random", or None for the published weights.
        classes: names of the classes, or a file of them.
    """
    if weights is None:
        with hub_access(f"bcos:{name}", _HOST):
            model, count = build(name, pretrained=True), _CLASSES
    else:
        model, count = build_with_weights(partial(build, name), weights, _CLASSES)
    traits = Traits(compete=True) if name.startswith(_STANDARD) else BCOS
    transform: Any = model.transform  # that of the package
    preprocessing = Preprocessing.of_transform(transform)
    return Adapter(model, preprocessing, class_names(count, classes), spec=f"bcos:{name}", traits=traits)


def build(name: str, **options: Any) -> nn.Module:
    """Build the architecture, with the package's preprocessing as ``.transform``."""
    package = import_optional("bcos.models.pretrained", extra="bcos")
    known = package.list_available()
    if name not in known:
        hint = suggest_names(name, known) or f"; it has {', '.join(known)}"
        raise UnknownName(f"bcos has no model {name!r}{hint}")
    return getattr(package, name)(**options)  # type: ignore[no-any-return]


FAMILIES.register("bcos")(Family(load, "bcos:NAME", "B-cos networks of the bcos package", extra="bcos"))
