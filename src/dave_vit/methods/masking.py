"""Masking: scores of images with parts hidden by many masks, in passes that fit into memory; occlusion and RISE."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype, working_dtype
from dave_vit._internal.schema import Bounds, Count
from dave_vit.engine.forward import compute_logits
from dave_vit.engine.observation import find_patch_side
from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.constants import to_explanation
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize
from dave_vit.neighborhood.draws import sample_generator

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
    _kept, _resolution = "nothing", "patch"
    _: KW_ONLY
    baseline: float = 0.0
    score: Score = "probability"

    def _mask(self, images: Tensor, target: Target, pass_size: PassSize) -> MaskedImages:
        """Return images to hide parts of, for a resolved target."""
        return MaskedImages(self, images, target, pass_size, self.score, self.baseline)

    def _score_clean(self, images: Tensor, target: Target, pass_size: PassSize) -> tuple[Target, Tensor]:
        """Resolve the target on the unmasked images, and return it with their scores ``[b, K]``."""
        logits = self._logits(images, target, pass_size)
        target = target.resolve(logits)
        return target, target_scores(logits, target, self.score)


def score_rows(method: Method, rows: Tensor, target: Target, pass_size: PassSize, score: Score = "logit") -> Tensor:
    """Score rows ``[n, b, C, H, W]``, n for each image: ``[n, b, K]``.

    Args:
        method: has the model and its precision.
        rows: inputs of the model.
        target: resolved target of the b images.
        pass_size: number of rows in a pass.
        score: "probability" is the softmax of the class; contrasts and score functions have none and keep their value.
    """

    def compute(rows: Tensor, target: Target) -> Tensor:
        return target_scores(compute_logits(method.model, rows, target.read, method.autocast), target, score)

    return pass_size.run_rows(compute, rows, target)


def target_scores(logits: Tensor, target: Target, score: Score) -> Tensor:
    """Return the target's scores from the model's logits: ``[rows, K]``, in float32 at least."""
    logits = logits.to(working_dtype(logits.dtype))
    if score == "probability" and target.score is None and not target.has_contrast:
        logits = logits.softmax(1)
    return target.scores(logits)


@dataclass(frozen=True)
class MaskedImages:
    """Images that are scored with parts hidden.

    Attributes:
        method: has the model and its precision.
        images: ``[b, C, H, W]``.
        target: resolved target of the images.
        pass_size: number of rows in a pass.
        score: as of `score_rows`.
        background: what hidden pixels show.
    """

    method: Method
    images: Tensor
    target: Target
    pass_size: PassSize
    score: Score = "logit"
    background: float | Tensor = 0.0

    def score_masks(self, masks: Masks, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the masks pass by pass with the scores of the images under them: ``[n, b, K]``."""
        start = 0
        while start < count:
            stop = min(start + self.pass_size.samples_per_pass(self.images), count)
            mask = masks(start, stop).to(self.images.device, self.images.dtype)
            rows = self.background + mask.unsqueeze(2) * (self.images - self.background)  # [n, b, C, H, W]
            yield mask, score_rows(self.method, rows, self.target, self.pass_size, self.score)
            start = stop

    def score_squares(self, squares: Squares, shown: Tensor) -> Tensor:
        """Score images with some squares shown, ``[n, P]`` or ``[n, b, P]``: ``[n, b, K]``, in the widest type."""
        rows = shown.reshape(len(shown), -1, squares.count)
        parts = self.score_masks(lambda start, stop: squares.masks(rows[start:stop]), len(rows))
        return torch.cat([scores for _, scores in parts]).to(precise_dtype(self.images.device))


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
        return self.masks(values / self._index(values).bincount())

    def means(self, maps: Tensor) -> Tensor:
        """Average maps ``[..., H, W]`` over the pixels of each square: ``[..., count]``."""
        index = self._index(maps)
        sums = maps.new_zeros(*maps.shape[:-2], self.count).index_add(-1, index, maps.flatten(-2))
        return sums / index.bincount()

    def _index(self, like: Tensor) -> Tensor:
        """Return the square of each pixel, ``[H * W]``, on the device of a tensor."""
        return self.masks(torch.arange(self.count, device=like.device)).flatten()


@METHODS.register("occlusion")
class Occlusion(MaskingMethod):
    """Fall of the class's probability when a window is hidden.

    The drop of the score under each window; pixels under several windows get the mean of their drops.

    Args:
        model: any module that maps inputs to logits.
        window: side of the window in pixels; two patches of the model, or a seventh of the image.
        stride: pixels from one window to the next; half of the window by default.
        options: ``baseline``, ``score``, ``chunk`` and ``autocast``, as for every `MaskingMethod`.
    """

    info = MethodInfo(paper="Zeiler and Fergus, ECCV 2014", passes="1 + windows forward", unit="range")

    window: Count | None = None
    stride: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise OptionError(
                f"stride is {self.stride} and window is {self.window}; no pixel may be skipped, give a stride up to it"
            )

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        places = self._places(images)
        target, clean = self._score_clean(images, target, pass_size)  # [b, K]

        def masks(start: int, stop: int) -> Tensor:
            shown = images.new_ones(stop - start, 1, *images.shape[-2:])
            for mask, (rows, columns) in zip(shown, places[start:stop], strict=True):
                mask[:, rows, columns] = 0
            return shown

        drops, covered = clean.new_zeros(*clean.shape, *images.shape[-2:]), clean.new_zeros(images.shape[-2:])
        for shown, scores in self._mask(images, target, pass_size).score_masks(masks, len(places)):
            hidden = 1 - shown[:, 0].to(scores.dtype)  # [n, H, W]
            drops += torch.einsum("nbk,nhw->bkhw", clean - scores, hidden)
            covered += hidden.sum(0)
        return to_explanation(drops / covered, images, target)

    def _places(self, images: Tensor) -> list[tuple[slice, slice]]:
        """Return the windows; those at the right and lower edge may be cropped."""
        window = self.window or 2 * Squares.of(self.model, images, None).side
        stride = min(self.stride or max(1, window // 2), window)
        starts = (range(0, max(extent - window, 0) + stride, stride) for extent in images.shape[-2:])
        return list(product(*([slice(start, start + window) for start in side] for side in starts)))


@METHODS.register("rise")
class RISE(MaskingMethod):
    """Mean of random masks, weighted by the class's probability under them.

    The mean of smooth random masks, each weighted by the score of the image masked with it.

    Args:
        model: any module that maps inputs to logits.
        samples: masks.
        seed: the same seed gives the same masks, whatever the batch and the chunk.
        cells: number of cells of a mask along each side, before it is enlarged and shifted.
        shown: probability with which a cell shows the image.
        options: ``baseline``, ``score``, ``chunk`` and ``autocast``, as for every `MaskingMethod`.
    """

    info = MethodInfo(paper="Petsiuk et al., BMVC 2018", passes="1 + T forward", unit="range")
    _budget_option = ("samples", 0)
    samples: Count = 4000
    seed: int = 0
    cells: Count = 7
    shown: Annotated[float, Bounds(above=0, below=1)] = 0.5

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        target = self._resolve_target(images, target, pass_size)
        total, squares = torch.zeros(2, 1, dtype=images.dtype, device=images.device)
        masks_of = partial(self.masks, (images.shape[-2], images.shape[-1]))
        for masks, scores in self._mask(images, target, pass_size).score_masks(masks_of, self.samples):
            shown = masks[:, 0].to(scores.dtype) / self.shown  # [n, H, W]
            total = total + torch.einsum("nbk,nhw->bkhw", scores, shown)
            squares = squares + torch.einsum("nbk,nhw->bkhw", scores.square(), shown.square())
        mean = total / self.samples  # eq. (6)
        spread = (squares / self.samples - mean.square()).clamp(min=0)
        error = (spread / max(self.samples - 1, 1)).sqrt()
        mean, error = (part.to(images.dtype) for part in (mean, error))  # [b, K, H, W]
        explanation = to_explanation(mean, images, target)
        return replace(explanation, samples=self.samples, mean=mean, standard_error=error)

    def masks(self, size: tuple[int, int], start: int, stop: int) -> Tensor:
        """Return masks ``start`` to ``stop`` of this seed, for images of one size: ``[n, 1, H, W]``."""
        return torch.stack([self._draw(size, index) for index in range(start, stop)])

    def _draw(self, size: tuple[int, int], index: int) -> Tensor:
        """Draw random cells, enlarge them beyond the image by one cell, and crop a random window."""
        drawn = torch.rand(1, 1, self.cells, self.cells, generator=sample_generator(self.seed, index, "noise"))
        cell = [-(-extent // self.cells) for extent in size]
        wide = F.interpolate((drawn < self.shown).float(), [(self.cells + 1) * side for side in cell], mode="bilinear")
        moves = sample_generator(self.seed, index, "spatial")
        top, left = (int(torch.randint(side, (1,), generator=moves)) for side in cell)
        return wide[0, :, top : top + size[0], left : left + size[1]]
