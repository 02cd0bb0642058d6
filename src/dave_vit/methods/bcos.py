"""The inherent explanation of B-cos networks."""

from __future__ import annotations

from typing import Any

from torch import nn

from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.dave import Effective


@METHODS.register("bcos")
class Bcos(Effective):
    """The dynamic linear weights of a B-cos network times the input.

    A B-cos network is linear once its dynamic weights are held, and holding them is what the effective transformation
    does; so the map equals that of the method ``effective``, and of the network's own explanation mode.

    Args:
        model: a B-cos network.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(
        "Dynamic linear weights of a B-cos network, times the input.",
        "Böhle et al., TPAMI 2024",
        "1 forward, 1 backward",
        unit="logit",
    )

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        if not any(hasattr(module, "set_explanation_mode") for module in model.modules()):
            raise UnsupportedOperator(
                "bcos explains B-cos networks, and this model has no B-cos module; use effective, its generalisation"
            )
