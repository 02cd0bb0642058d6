"""OMENN: the logit as one matrix, weights times input plus biases, which sums to the logit exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.located import Located, contributions, per_channel, spread_evenly
from dave_vit.precision import precise_dtype
from dave_vit.rules import EFFECTIVE
from dave_vit.targets import TargetLike, resolve_target


@METHODS.register("omenn")
class OMENN(Located):
    """One matrix to explain a network: C = C_w * x + C_b, with sum(C) = logit.

    With all operators frozen (dynamic linearity) the logit is affine in the input. C_w is the effective transformation.
    C_b holds what each additive constant contributes (biases, position embeddings, class and register tokens),
    at the place where it acts: a value of a feature map or token is shared evenly by the pixels of its place and by
    their channels; what has no place in the image (class token, pooled features, windows) by all pixels. Hence

        sum(C) = <W, x> + sum over constants <ds/db, b> = logit

    for every model that the effective transformation covers.

    Args:
        model: any module that maps inputs to logits.
        chunk: has no effect here; images go through one by one, so that every constant is known to be theirs.
        autocast: run the model under autocast.
    """

    info = MethodInfo(
        "Effective transformation times input, plus every bias at the place where it acts; sums to the logit.",
        "Wróbel et al., 2024",
        "1 forward, 1 backward",
    )

    def _single(self, image: Tensor, target: TargetLike) -> tuple[Tensor, Tensor]:
        found, parts = contributions(self.model, image, target, rules=EFFECTIVE, autocast=self.autocast)
        size = (image.shape[-2], image.shape[-1])
        biases = torch.zeros(size, dtype=precise_dtype(image.device), device=image.device)
        for part in parts:
            biases += part.elsewhere / biases.numel()
            if part.grid is not None:
                biases += spread_evenly(part.grid.sum(0), size)
        matrix = found.weight * image + per_channel(biases, image.shape[1]).to(image.dtype)
        return matrix, resolve_target(found.logits, target)
