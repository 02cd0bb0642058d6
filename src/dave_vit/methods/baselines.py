"""Baselines of a comparison: maps that do not depend on the model."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from dave_vit._internal.schema import Limits
from dave_vit.engine.targets import Target
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.constants import per_channel
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize, clean_logits
from dave_vit.neighborhood.draws import normal_samples


@METHODS.register("random")
class Random(Method):
    """Random values: the floor of every score.

    Independent normal values, the same for every image and every class of a seed.

    Args:
        model: used for the predicted class only.
        seed: another seed gives another map.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(paper="baseline", passes="1 forward, for the predicted class", class_specific=False)
    _kept = "nothing"
    seed: int = 0

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        values = normal_samples(self.seed, images.shape[1:], 0, 1)[0]
        return _repeat_map(self, values, images, target, pass_size)


@METHODS.register("center")
class Center(Method):
    """A Gaussian in the middle of the image, where photographers put their subjects.

    Args:
        model: used for the predicted class only.
        width: standard deviation, as a fraction of each side.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(paper="baseline", passes="1 forward, for the predicted class", class_specific=False)
    _kept = "nothing"
    width: Annotated[float, Limits(above=0)] = 0.25

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        row, column = (self._profile(extent).to(images.dtype) for extent in images.shape[-2:])
        values = per_channel(row[:, None] * column, images.shape[-3]).expand(images.shape[1:])  # [C, H, W]
        return _repeat_map(self, values, images, target, pass_size)

    def _profile(self, extent: int) -> Tensor:
        at = (torch.arange(extent, dtype=torch.float64) + 0.5) / extent - 0.5
        return torch.exp(-at.square() / (2 * self.width**2))


def _repeat_map(method: Method, values: Tensor, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
    """Return the same values ``[C, H, W]`` for every image and target; the target is checked all the same."""
    target = target.resolve(clean_logits(method.model, images, pass_size, target.read, method.autocast))
    attribution = values.to(images.device, images.dtype).expand(len(images), target.count, *values.shape).clone()
    return Explanation(attribution, target.indices)
