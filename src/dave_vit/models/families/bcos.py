"""B-cos networks of the ``bcos`` package: colours and their complements in, additive noise around them."""

from __future__ import annotations

from typing import Any

from torch import nn

from dave_vit.errors import UnknownName, missing_extra
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.classes import Classes, class_names
from dave_vit.models.hub import hub_access
from dave_vit.models.state import RANDOM, classes_in, load_state, read_weights
from dave_vit.neighborhood import Noise
from dave_vit.registry import nearest

BCOS_NOISE = Noise("additive", 0.2)
"""What the paper uses for B-cos networks (appendix D.2)."""

_PUBLISHED = "https://github.com"
_STANDARD = "standard_"  # the package's plain counterparts of its B-cos networks


def load(name: str, weights: str | None = None, classes: Classes | None = None) -> Adapter:
    """A network of the package by its name, such as ``simple_vit_b_patch16_224`` or ``vitc_b_patch1_14``.

    Args:
        name: as the package spells it.
        weights: a local file, "random", or None for the published weights.
        classes: names of the classes, or a file of them.
    """
    if weights is None:
        with hub_access(f"bcos:{name}", _PUBLISHED):
            model = build(name, pretrained=True)
    else:
        model = build(name)
    if weights not in (None, RANDOM):
        found = read_weights(str(weights))
        count = classes_in(found, model, 1000)
        model = model if count == 1000 else build(name, num_classes=count)
        load_state(model, found)
    return wrap(model, classes, spec=f"bcos:{name}", is_bcos=not name.startswith(_STANDARD))


def wrap(model: nn.Module, classes: Classes | None, *, spec: str, is_bcos: bool = True) -> Adapter:
    """A network of the package with the transform that it carries."""
    steps: Any = model.transform
    scaling = next((step for step in steps.transforms.transforms if hasattr(step, "mean")), None)
    colours = Preprocessing(steps, tuple(scaling.mean), tuple(scaling.std)) if scaling else Preprocessing(steps)
    names = class_names(_count(model), classes)
    return Adapter(
        model, colours, names, spec=spec, noise=BCOS_NOISE if is_bcos else None, fill=0.5 if is_bcos else 0.0
    )


def _count(model: nn.Module) -> int:
    return next(int(value.shape[0]) for value in reversed(list(model.state_dict().values())) if value.ndim > 1)


def names() -> list[str]:
    """All networks that the package offers."""
    return [str(name) for name in _package().list_available()]


def build(name: str, **options: Any) -> nn.Module:
    """The architecture, with the package's preprocessing as ``.transform``."""
    package = _package()
    if name not in package.list_available():
        hint = nearest(name, names()) or f"; it has {', '.join(names())}"
        raise UnknownName(f"bcos has no model {name!r}{hint}")
    model: nn.Module = getattr(package, name)(**options)
    return model


def _package() -> Any:
    try:
        import bcos.models.pretrained as package
    except ImportError as error:
        raise missing_extra("bcos", "bcos") from error
    return package
