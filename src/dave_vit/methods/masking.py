"""What a model says of images of which parts are hidden, by many masks, in passes that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.forward import autocast_context
from dave_vit.engine.targets import Target
from dave_vit.engine.token_layout import find_patch_side
from dave_vit.methods.base import Explanation, Method
from dave_vit.methods.bias_placement import per_channel
from dave_vit.methods.pass_size import PassSize, clean_logits

Masks = Callable[[int, int], Tensor]
"""Masks ``start`` to ``stop``: ``[n, 1, H, W]`` for all images alike, or ``[n, b, H, W]``; 1 shows, 0 hides."""
Score = Literal["probability", "logit"]

_MOST = 16  # squares along a side: a model's own patches may be too many to be hidden one by one


def whole(method: Method, images: Tensor, target: Target, pass_size: PassSize, score: Score) -> tuple[Target, Tensor]:
    """The target with its classes known, and what is explained of the images as they are: ``[b, K]``."""
    logits = _logits(method, images, target, pass_size)
    target = target.resolve(logits)
    return target, told(logits, target, score)


def answers(method: Method, rows: Tensor, target: Target, pass_size: PassSize, score: Score = "logit") -> Tensor:
    """What is explained of rows ``[n, b, C, H, W]``, n for each image: ``[n, b, K]``.

    Args:
        method: gives the model and its precision.
        rows: what the model sees.
        target: of the b images; its classes are known.
        pass_size: of the call.
        score: "probability" is the softmax of the class; only a class by itself has one, all else is its own number.
    """
    flat, wanted = rows.flatten(0, 1), target.repeat(len(rows))
    return told(_logits(method, flat, wanted, pass_size), wanted, score).reshape(*rows.shape[:2], -1)


def _logits(method: Method, rows: Tensor, target: Target, pass_size: PassSize) -> Tensor:
    with autocast_context(rows, method.autocast):
        return clean_logits(method.model, rows, pass_size, target.read)


def told(logits: Tensor, target: Target, score: Score) -> Tensor:
    """What is explained of each row, out of the model's logits: ``[rows, K]``, in float32 at least."""
    logits = logits.to(working_dtype(logits.dtype))
    if score == "probability" and target.score is None and not target.has_contrast:
        logits = logits.softmax(1)
    return target.scores(logits)


def under_masks(
    method: Method,
    images: Tensor,
    target: Target,
    pass_size: PassSize,
    masks: Masks,
    count: int,
    score: Score = "logit",
    background: float = 0.0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Part by part, some of ``count`` masks and what the model says of the images under them: ``[n, b, K]``."""
    start = 0
    while start < count:
        stop = min(start + pass_size.samples_per_pass(images), count)
        part = masks(start, stop).to(images.device, images.dtype)
        rows = background + part.unsqueeze(2) * (images - background)  # [n, b, C, H, W]
        yield part, answers(method, rows, target, pass_size, score)
        start = stop


@dataclass(frozen=True)
class Squares:
    """Squares that tile an image in reading order; those at the right and lower edge may be cut.

    Attributes:
        side: in pixels.
        size: height and width of the image.
    """

    side: int
    size: tuple[int, int]

    @classmethod
    def of(cls, model: nn.Module, images: Tensor, side: int | None) -> Squares:
        """Of a side, or as large as the model's patches; where these are unknown or tiny, 14 along the image."""
        height, width = images.shape[-2:]
        own = find_patch_side(model) or 0
        if side is None:
            side = own if own * _MOST >= max(height, width) else max(1, min(height, width) // 14)
        return cls(side, (height, width))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return -(-self.size[0] // self.side), -(-self.size[1] // self.side)

    @property
    def count(self) -> int:
        """How many there are."""
        return self.grid[0] * self.grid[1]

    def masks(self, shown: Tensor) -> Tensor:
        """Masks ``[..., H, W]`` in which all pixels of a square have its value ``[..., count]``."""
        grid = shown.reshape(*shown.shape[:-1], *self.grid)  # [..., rows, columns]
        wide: Tensor = grid.repeat_interleave(self.side, -2).repeat_interleave(self.side, -1)
        return wide[..., : self.size[0], : self.size[1]]

    def shared(self, values: Tensor) -> Tensor:
        """Maps ``[..., H, W]`` of values ``[..., count]``, each shared evenly by the pixels of its square."""
        pixels = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        place = self.masks(torch.arange(self.count, device=values.device)).flatten()
        pixels = pixels.scatter_add(0, place, torch.ones_like(place, dtype=values.dtype))
        return self.masks(values / pixels)


def as_explanation(maps: Tensor, images: Tensor, target: Target) -> Explanation:
    """Maps ``[b, K, H, W]`` as an explanation, spread evenly over the channels."""
    made = per_channel(maps, images.shape[1]).to(images.dtype).contiguous()  # [b, K, C, H, W]
    return Explanation(made, target.indices)
