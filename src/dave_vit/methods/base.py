"""What every attribution method is: a model in, signed attributions in the shape of the input out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dave_vit.errors import OptionError
from dave_vit.maps import collapse
from dave_vit.registry import Registry
from dave_vit.run.gradient import check_inputs, logits_of
from dave_vit.targets import TargetLike, resolve_target


@dataclass(frozen=True)
class MethodInfo:
    """What a table of methods says about one.

    Attributes:
        summary: one sentence.
        paper: where it was published.
        passes: forward and backward passes a map costs, as a phrase such as "1 forward, 1 backward".
        resolution: whether it resolves pixels or patches.
        class_specific: whether another target gives another map.
    """

    summary: str
    paper: str
    passes: str
    resolution: Literal["pixel", "patch"] = "pixel"
    class_specific: bool = True


@dataclass(frozen=True)
class Explanation:
    """The outcome for a batch.

    Attributes:
        attribution: signed, in the shape of the inputs ``[B, C, H, W]``.
        target: the explained class of each image ``[B]``.
        standard_error: of the map over the samples ``[B, H, W]``, for methods that draw samples.
        samples: how many samples it rests on.
        postprocess: how the method's own map is made of the channel sum, where it prescribes one.
    """

    attribution: Tensor
    target: Tensor
    standard_error: Tensor | None = None
    samples: int = 1
    postprocess: Callable[[Tensor], Tensor] | None = None

    @property
    def map(self) -> Tensor:
        """One channel for looking at, ``[B, H, W]``: the channel sum, or the method's own post-processing of it."""
        several = self.attribution.shape[:-3]  # [B], or [B, K]
        summed = collapse(self.attribution.flatten(0, -4))
        shown = summed if self.postprocess is None else self.postprocess(summed)
        return shown.reshape(*several, *shown.shape[1:])

    def _repr_png_(self) -> bytes:
        """The maps as a picture, for notebooks."""
        picture: bytes = import_module("dave_vit.viz").show(self)._repr_png_()  # found by name: a room further on
        return picture


class Method(ABC):
    """Base of all methods.

    Args:
        model: any module that maps inputs ``[B, C, H, W]`` to logits ``[B, classes]``. It is never changed.

    Example:
        >>> attribution = create_method("input_x_gradient", model).attribute(images, target=207)
    """

    info: ClassVar[MethodInfo]

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def attribute(self, inputs: Tensor, target: TargetLike = None) -> Tensor:
        """Signed attributions in the shape of the inputs.

        Args:
            inputs: preprocessed images ``[B, C, H, W]``.
            target: a class index, one index an image, ``[B, K]`` indices, or None for the predicted class.

        Returns:
            ``[B, C, H, W]``; ``[B, K, C, H, W]`` for ``[B, K]`` targets.
        """
        return self.explain(inputs, target).attribution

    def explain(self, inputs: Tensor, target: TargetLike = None) -> Explanation:
        """Attributions with what is known of their certainty."""
        indices = self.resolve(inputs, target)
        if indices.ndim == 1:
            return Explanation(self._attribute(inputs, indices), indices)
        columns = [self._attribute(inputs, column) for column in indices.unbind(1)]
        return Explanation(torch.stack(columns, 1), indices)

    def resolve(self, inputs: Tensor, target: TargetLike) -> Tensor:
        """Class indices of the clean images; the logits are computed once."""
        check_inputs(inputs)
        return resolve_target(logits_of(self.model, inputs), target)

    @abstractmethod
    def _attribute(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Attributions for resolved targets ``[B]``."""


METHODS: Registry[type[Method]] = Registry("method")


def create_method(name: str, model: nn.Module, **options: Any) -> Method:
    """A method by its name.

    Args:
        name: one of ``METHODS``.
        model: the model to explain.
        options: the method's own options.
    """
    try:
        return METHODS[name](model, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise OptionError(f"method {name!r}: {str(error).split('() ')[-1]}") from error
