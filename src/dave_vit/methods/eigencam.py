"""Eigen-CAM: the first principal component of the features, whatever the class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.observation import Observation
from dave_vit.engine.targets import Target
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.gradcam import ActivationMap, features
from dave_vit.methods.pass_size import PassSize


@METHODS.register("eigencam")
class EigenCAM(ActivationMap):
    """The projection of the features at each place onto their first right singular vector.

    The features are those of ``gradcam``. A singular vector has no sign of its own: the place farthest from zero is
    made positive.

    Args:
        model: any module that maps inputs to logits.
        centred: subtract the mean over all places from each channel first, as the grad-cam package does.
        options: ``positive``, ``resolution``, ``chunk`` and ``autocast``, as for every `ActivationMap`.
    """

    info = MethodInfo(
        "First principal component of the last block's tokens.",
        "Muhammad and Yeasin, IJCNN 2020",
        "1 forward",
        resolution="patch",
        class_specific=False,
    )

    def __init__(self, model: nn.Module, *, centred: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        self.centred = centred

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        source, to_grid = features(observed, images)
        values = to_grid(source.detach()).to(precise_dtype(images.device))  # [b, D, h, w]
        grid = principal_component(values.flatten(2).mT, centred=self.centred).reshape(
            len(images), 1, *values.shape[2:]
        )
        return grid.expand(-1, target.count, -1, -1)


def principal_component(places: Tensor, *, centred: bool) -> Tensor:
    """Project features ``[b, P, D]`` onto their first right singular vector: ``[b, P]``, the largest value positive."""
    values = places - places.mean(1, keepdim=True) if centred else places
    direction = torch.linalg.svd(values, full_matrices=False).Vh[:, 0]  # [b, D]
    projection = torch.einsum("bpd,bd->bp", values, direction)
    farthest = projection.gather(1, projection.abs().argmax(1, keepdim=True))
    return projection * farthest.sign()
