"""Masking: scores of images with parts hidden by many masks, in passes that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import working_dtype
from dave_vit._internal.schema import check_choice
from dave_vit.engine.observation import find_patch_side
from dave_vit.engine.targets import Target
from dave_vit.methods.base import Method
from dave_vit.methods.bias_placement import per_channel
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize, clean_logits

Masks = Callable[[int, int], Tensor]
"""Function that returns masks ``start`` to ``stop``: ``[n, 1, H, W]`` for all images, or ``[n, b, H, W]``; 0 hides."""
Score = Literal["probability", "logit"]

_MOST = 16  # most squares along a side: a model's own patches may be too many to hide one by one


class MaskingMethod(Method):
    """Base of methods that score images with parts hidden.

    Args:
        model: any module that maps inputs to logits.
        baseline: value of hidden pixels; zero is the mean colour of normalised images.
        score: the class's "probability" or its "logit"; other targets are their own number.
        options: ``chunk`` (masked images in one forward pass) and ``autocast``.
    """

    _why_no_clips = "hides places of one image"
    _kept = "nothing"

    def __init__(
        self, model: nn.Module, *, baseline: float = 0.0, score: Score = "probability", **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.baseline = baseline
        self.score: Score = check_choice("score", score, get_args(Score))

    def _score_under_masks(
        self, images: Tensor, target: Target, pass_size: PassSize, masks: Masks, count: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return score_under_masks(self, images, target, pass_size, masks, count, self.score, self.baseline)


def score_images(
    method: Method, images: Tensor, target: Target, pass_size: PassSize, score: Score
) -> tuple[Target, Tensor]:
    """Resolve the target on the unmasked images, and return it with their scores ``[b, K]``."""
    logits = _logits(method, images, target, pass_size)
    target = target.resolve(logits)
    return target, target_scores(logits, target, score)


def score_rows(method: Method, rows: Tensor, target: Target, pass_size: PassSize, score: Score = "logit") -> Tensor:
    """Score rows ``[n, b, C, H, W]``, n for each image: ``[n, b, K]``.

    Args:
        method: has the model and its precision.
        rows: inputs of the model.
        target: resolved target of the b images.
        pass_size: number of rows in a pass.
        score: "probability" is the softmax of the class; contrasts and score functions have none and keep their value.
    """
    flat, repeated = rows.flatten(0, 1), target.repeat(len(rows))
    return target_scores(_logits(method, flat, repeated, pass_size), repeated, score).reshape(*rows.shape[:2], -1)


def _logits(method: Method, rows: Tensor, target: Target, pass_size: PassSize) -> Tensor:
    return clean_logits(method.model, rows, pass_size, target.read, method.autocast)


def target_scores(logits: Tensor, target: Target, score: Score) -> Tensor:
    """Return the target's scores from the model's logits: ``[rows, K]``, in float32 at least."""
    logits = logits.to(working_dtype(logits.dtype))
    if score == "probability" and target.score is None and not target.has_contrast:
        logits = logits.softmax(1)
    return target.scores(logits)


def score_under_masks(
    method: Method,
    images: Tensor,
    target: Target,
    pass_size: PassSize,
    masks: Masks,
    count: int,
    score: Score = "logit",
    background: float | Tensor = 0.0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the masks pass by pass with the scores of the images under them: ``[n, b, K]``."""
    start = 0
    while start < count:
        stop = min(start + pass_size.samples_per_pass(images), count)
        mask = masks(start, stop).to(images.device, images.dtype)
        rows = background + mask.unsqueeze(2) * (images - background)  # [n, b, C, H, W]
        yield mask, score_rows(method, rows, target, pass_size, score)
        start = stop


@dataclass(frozen=True)
class Squares:
    """Squares that tile an image in reading order, cropped at the right and lower edge.

    Attributes:
        side: in pixels.
        size: height and width of the image.
    """

    side: int
    size: tuple[int, int]

    @classmethod
    def of(cls, model: nn.Module, images: Tensor, side: int | None) -> Squares:
        """Return squares of a side, by default that of the model's patches; 14 along the image if these are tiny."""
        height, width = images.shape[-2:]
        own = find_patch_side(model) or 0
        if side is None:
            side = own if own * _MOST >= max(height, width) else max(1, min(height, width) // 14)
        return cls(side, (height, width))

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and columns."""
        return -(-self.size[0] // self.side), -(-self.size[1] // self.side)

    @property
    def count(self) -> int:
        """Number of squares."""
        return self.grid[0] * self.grid[1]

    def masks(self, shown: Tensor) -> Tensor:
        """Expand values of the squares ``[..., count]`` to their pixels: ``[..., H, W]``."""
        grid = shown.reshape(*shown.shape[:-1], *self.grid)  # [..., rows, columns]
        wide: Tensor = grid.repeat_interleave(self.side, -2).repeat_interleave(self.side, -1)
        return wide[..., : self.size[0], : self.size[1]]

    def spread(self, values: Tensor) -> Tensor:
        """Divide values ``[..., count]`` evenly among the pixels of their squares: ``[..., H, W]``."""
        pixels = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        index = self.masks(torch.arange(self.count, device=values.device)).flatten()
        pixels = pixels.scatter_add(0, index, torch.ones_like(index, dtype=values.dtype))
        return self.masks(values / pixels)


def to_explanation(maps: Tensor, images: Tensor, target: Target) -> Explanation:
    """Return maps ``[b, K, H, W]`` as an explanation, divided evenly among the channels."""
    attribution = per_channel(maps, images.shape[1]).to(images.dtype).contiguous()  # [b, K, C, H, W]
    return Explanation(attribution, target.indices)
