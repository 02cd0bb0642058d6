"""What is explained: class indices, several of them, or any score of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dave_vit.errors import TargetError

Score = Callable[[Tensor], Tensor]
Target = int | Sequence[int] | Sequence[Sequence[int]] | Tensor | Score | None
"""An index for all images, one index an image, a row of indices an image, a score function, or the predicted class."""


def resolve_target(logits: Tensor, target: Target) -> Tensor:
    """Class indices for a batch: ``[B]``, or ``[B, K]`` where several classes of each image are asked for."""
    batch, classes = logits.shape
    if target is None:
        return logits.detach().argmax(1)
    if callable(target) and not isinstance(target, Tensor):
        raise TargetError("a score function has no class indices; give an int, a list or a tensor of indices")
    indices = torch.as_tensor(target, device=logits.device)
    if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
        raise TargetError(f"target has type {indices.dtype}; give class indices as integers")
    indices = indices.long()
    if indices.ndim == 0:
        indices = indices.expand(batch)
    if indices.ndim > 2 or indices.shape[0] != batch:
        raise TargetError(
            f"target has shape {tuple(indices.shape)} for a batch of {batch}; give one index, [{batch}] indices, "
            f"or [{batch}, K] indices"
        )
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= classes:
        raise TargetError(
            f"target {low if low < 0 else high} is out of range; the model has classes 0 to {classes - 1}"
        )
    return indices


def scores(logits: Tensor, target: Target) -> Tensor:
    """The explained numbers: ``[K, B]``, one row for each backward pass."""
    if callable(target) and not isinstance(target, Tensor):
        score = target(logits)
        if score.shape != logits.shape[:1]:
            raise TargetError(
                f"the score function returned shape {tuple(score.shape)}; it must return one number an image, "
                f"[{logits.shape[0]}]"
            )
        return score.unsqueeze(0)
    indices = resolve_target(logits, target)
    indices = indices.clone() if indices.is_inference() else indices  # autograd keeps no tensors of inference mode
    return logits.gather(1, indices.reshape(logits.shape[0], -1)).T  # [K, B]
