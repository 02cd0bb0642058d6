"""The embedded models, behind the same door as all others."""

from __future__ import annotations

from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.architectures.bcos_vit import BcosViT
from dave_vit.models.architectures.builtin import CentreCrop, architecture, build_builtin
from dave_vit.models.classes import Classes, class_names
from dave_vit.models.families.bcos import BCOS_NOISE
from dave_vit.models.state import RANDOM, load_state, read_weights


def load(name: str, weights: str | None = None, classes: Classes | None = None) -> Adapter:
    """An embedded model: "builtin" or "builtin-bcos".

    Args:
        name: of the model.
        weights: a local file for the same architecture, "random", or None for the embedded weights.
        classes: names of the classes, or a file of them.
    """
    from dave_vit.data.builtin import CLASS_NAMES

    model = build_builtin(name) if weights is None else architecture(name).create()
    if weights not in (None, RANDOM):
        load_state(model, read_weights(str(weights)))
    names = class_names(len(CLASS_NAMES), classes, known=CLASS_NAMES)
    is_bcos = isinstance(model, BcosViT)
    half = (0.0, 1.0) if is_bcos else (0.5, 0.5)
    preprocessing = Preprocessing(CentreCrop(architecture(name).encode), half[:1] * 3, half[1:] * 3)
    return Adapter(
        model, preprocessing, names, spec=name, noise=BCOS_NOISE if is_bcos else None, fill=0.5 if is_bcos else 0.0
    )
