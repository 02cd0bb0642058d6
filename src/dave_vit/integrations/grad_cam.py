"""All methods as drop-ins for the classes of pytorch-grad-cam; any other name is that of pytorch-grad-cam itself.

Example:
    >>> from dave_vit.integrations.grad_cam import DAVE
    >>> with DAVE(model=model, target_layers=[model.norm]) as cam:
    ...     heatmap = cam(input_tensor=inputs, targets=[ClassifierOutputTarget(281)])[0]
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit.engine.forward import evaluation_mode
from dave_vit.errors import InputError, OptionError, TargetError
from dave_vit.integrations import class_finder, list_classes
from dave_vit.methods import METHODS, create_method

Heatmaps = np.ndarray[Any, np.dtype[np.float32]]


class CAM:
    """Base of the generated classes. The model is explained in evaluation mode, and left in the mode that it was in.

    Args:
        model: any module that maps inputs to logits.
        target_layers: accepted and not used: methods here find the tokens of the last block by themselves.
            ``create_method("grad_cam:GradCAM", model, target_layers=...)`` has a choice.
        reshape_transform: accepted and not used.
        options: of the method, such as ``samples``.
    """

    method_name: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module] | None = None,
        reshape_transform: Callable[[Tensor], Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.model, self.target_layers, self.reshape_transform = model, target_layers, reshape_transform
        self._method = create_method(self.method_name, model, **options)
        self._inputs: Tensor | None = None

    def __call__(
        self,
        input_tensor: Tensor,
        targets: Sequence[Callable[[Any], Tensor]] | None = None,
        *,
        aug_smooth: bool = False,
        eigen_smooth: bool = False,
    ) -> Heatmaps:
        """Return heatmaps in 0 to 1, ``[B, H, W]``.

        Args:
            input_tensor: preprocessed images ``[B, C, H, W]``.
            targets: a function of an image's output for each image, such as ``ClassifierOutputTarget(281)``; None for
                the predicted classes.
            aug_smooth: not supported.
            eigen_smooth: not supported.
        """
        if aug_smooth or eigen_smooth:
            raise OptionError("aug_smooth and eigen_smooth are not supported; DAVE averages over changed copies itself")
        if not isinstance(input_tensor, Tensor):
            raise InputError(f"input_tensor is of type {type(input_tensor).__name__}; give a float tensor [B, C, H, W]")
        if targets is not None and len(targets) != len(input_tensor):
            raise TargetError(f"{len(targets)} targets for {len(input_tensor)} images; give one for each image")
        self._inputs = input_tensor
        with evaluation_mode(self.model):
            parts = [self._method.explain(*part).heatmap for part in _split_targets(input_tensor, targets)]
        return torch.cat(parts).float().numpy(force=True)

    forward = __call__

    @property
    def outputs(self) -> Any:
        """The model's output for the images of the last call; it takes a forward pass."""
        if self._inputs is None:
            return None
        with evaluation_mode(self.model), torch.no_grad():
            return self.model(self._inputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is left on the model that would have to be removed."""


def _split_targets(images: Tensor, targets: Sequence[Callable[[Any], Tensor]] | None) -> list[tuple[Tensor, Any]]:
    """Return images with a target of this package: all together for classes, one by one for other functions."""
    if targets is None:
        return [(images, None)]
    if all(type(target).__name__ == "ClassifierOutputTarget" for target in targets):
        return [(images, [target.category for target in targets])]  # type: ignore[attr-defined]
    return [(image, _score(target)) for image, target in zip(images.split(1), targets, strict=True)]


def _score(target: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Return a function of the outputs of several images that are copies of one."""
    return lambda outputs: torch.stack([target(output).reshape(()) for output in outputs])


@cache
def _build(method: str) -> type[CAM]:
    kind = METHODS[method]
    return type(kind.__name__, (CAM,), {"method_name": method, "__module__": __name__, "__doc__": kind.__doc__})


__getattr__ = class_finder(__name__, _build, "pytorch_grad_cam", "grad-cam")
__dir__ = list_classes
