"""Score-CAM: class activation maps without gradients, each channel weighted by the score of the image under it."""

from __future__ import annotations

import torch
from torch import Tensor

from dave_vit.engine.observation import Observation
from dave_vit.engine.targets import Target
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.bias_placement import scale_to_unit, upsample
from dave_vit.methods.gradcam import ActivationMap, features
from dave_vit.methods.masking import score_under_masks
from dave_vit.methods.pass_size import PassSize


@METHODS.register("scorecam")
class ScoreCAM(ActivationMap):
    """The channels of a feature map, weighted by the score of the image masked with each of them.

    The features are those of ``gradcam``. Each channel, enlarged to the image and scaled from 0 to 1, is a mask; the
    softmax of the scores over the channels weighs them.

    Args:
        model: any module that maps inputs to logits.
        positive: keep the positive part of the map only, as published; otherwise the signed sum.
        options: ``resolution``, ``chunk`` (masked images in one forward pass) and ``autocast``.
    """

    info = MethodInfo(
        "Channels of the last block's tokens, weighted by the score of the image seen through them.",
        "Wang et al., CVPR 2020 workshop",
        "1 + D forward, D being the channels",
        resolution="patch",
    )

    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        source, to_grid = features(observed, images)
        values = to_grid(source.detach()).to(images.dtype)  # [b, D, h, w]

        def masks(start: int, stop: int) -> Tensor:
            return scale_to_unit(upsample(values[:, start:stop], images.shape[-2:])).transpose(0, 1)  # [n, b, H, W]

        parts = score_under_masks(self, images, target, pass_size, masks, values.shape[1])
        weights = torch.cat([scores for _, scores in parts]).softmax(0)  # [D, b, K]
        return torch.einsum("dbk,bdhw->bkhw", weights.to(values.dtype), values)
