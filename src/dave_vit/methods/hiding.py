"""What a model says of images of which parts are hidden, by many masks, in passes that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from dave_vit.methods.base import Method
from dave_vit.methods.chunks import Passes, clean_logits
from dave_vit.precision import working_dtype
from dave_vit.run.passes import precision
from dave_vit.targets import Target

Masks = Callable[[int, int], Tensor]
"""Masks ``start`` to ``stop``: ``[n, 1, H, W]`` for all images alike, or ``[n, b, H, W]``; 1 shows, 0 hides."""
Score = Literal["probability", "logit"]


def answers(method: Method, rows: Tensor, target: Target, passes: Passes, score: Score = "logit") -> Tensor:
    """What is explained of rows ``[n, b, C, H, W]``, n for each image: ``[n, b, K]``.

    Args:
        method: gives the model and its precision.
        rows: what the model sees.
        target: of the b images; its classes are known.
        passes: of the call.
        score: "probability" is the softmax of the class; only a class by itself has one, all else is its own number.
    """
    flat, wanted = rows.flatten(0, 1), target.repeated(len(rows))
    with precision(flat, method.autocast):
        logits = clean_logits(method.model, flat, passes, wanted.read)
    logits = logits.to(working_dtype(logits.dtype))
    if score == "probability" and target.score is None and target.opponent is None:
        logits = logits.softmax(1)
    return wanted.rows(logits).T.reshape(*rows.shape[:2], -1)  # [K, n * b] -> [n, b, K]


def under_masks(
    method: Method,
    images: Tensor,
    target: Target,
    passes: Passes,
    masks: Masks,
    count: int,
    *,
    background: Tensor | float = 0.0,
    score: Score = "logit",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Part by part, some of ``count`` masks and what the model says of the images under them: ``[n, b, K]``."""
    hidden = torch.as_tensor(background, dtype=images.dtype, device=images.device)
    start = 0
    while start < count:
        stop = min(start + passes.samples(images), count)
        part = masks(start, stop).to(images.device, images.dtype)
        rows = hidden + part.unsqueeze(2) * (images - hidden)  # [n, b, C, H, W]
        yield part, answers(method, rows, target, passes, score)
        start = stop
