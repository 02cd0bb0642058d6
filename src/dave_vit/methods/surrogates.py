"""LIME and Kernel SHAP: a linear model of which squares are shown, fitted to the scores of the model."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit._internal.schema import Count, Limits
from dave_vit.engine.targets import Target
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.masking import MaskingMethod, Score, Squares, score_images, to_explanation
from dave_vit.methods.pass_size import PassSize
from dave_vit.neighborhood.draws import sample_generator


@METHODS.register("lime")
class LIME(MaskingMethod):
    """Weights of a linear model of which patches are shown, fitted near the image.

    The weights of a ridge regression of the score on which squares of the image are shown. Images that show more
    squares count more, by a kernel of the cosine distance to the whole image, which is the first of the samples' rows.
    Each weight is divided among the pixels of its square.

    Args:
        model: any module that maps inputs to logits.
        samples: images with random squares hidden.
        seed: the same seed hides the same squares, whatever the batch and the chunk.
        patch: side of the squares in pixels; the model's own patches, or a 14th of the image where these are tiny.
        width: of the kernel.
        ridge: penalty on the squares of the weights.
        options: ``baseline``, ``score``, ``chunk`` and ``autocast``, as for every `MaskingMethod`.
    """

    info = MethodInfo(paper="Ribeiro et al., KDD 2016", passes="1 + T forward")
    _budget_option = ("samples", 1)
    samples: Count = 1000
    seed: int = 0
    patch: Count | None = None
    width: Annotated[float, Limits(above=0)] = 0.25
    ridge: Annotated[float, Limits(above=0)] = 1.0

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        squares = Squares.of(self.model, images, self.patch)
        target, clean = score_images(self, images, target, pass_size, self.score)
        rows = self.rows(squares.count).to(images.device, precise_dtype(images.device))  # [T, P]
        scores = _score_squares(self, images, target, pass_size, squares, rows)  # [T, b, K]
        shown = torch.cat([torch.ones_like(rows[:1]), rows])
        weights = kernel(shown, self.width)
        values = ridge_regression(shown, weights, torch.cat([clean[None].to(scores.dtype), scores]), self.ridge)
        return to_explanation(squares.spread(values), images, target)

    def rows(self, count: int) -> Tensor:
        """Return which of the squares each sample of this seed shows, 0 or 1: ``[T, count]``."""
        draws = [sample_generator(self.seed, index, "noise") for index in range(self.samples)]
        return torch.stack([torch.randint(2, (count,), generator=draw) for draw in draws]).to(torch.float64)


def kernel(shown: Tensor, width: float) -> Tensor:
    """Return weights of rows ``[n, P]`` by their cosine distance to the row of ones: ``[n]``."""
    distance = 1 - shown.mean(1).sqrt()
    return torch.exp(-distance.square() / width**2).sqrt()


def ridge_regression(shown: Tensor, weights: Tensor, scores: Tensor, penalty: float) -> Tensor:
    """Return the weights of the squares in a weighted ridge regression with an intercept: ``[b, K, P]``.

    Args:
        shown: which squares a row shows, ``[n, P]``.
        weights: of the rows, ``[n]``.
        scores: what is regressed, ``[n, b, K]``.
        penalty: on the squares of the weights, not on the intercept.
    """
    share = (weights / weights.sum()).unsqueeze(1)
    centred = shown - (share * shown).sum(0)  # replaces the intercept
    left = centred.T * weights @ centred + penalty * torch.eye(shown.shape[1], dtype=shown.dtype, device=shown.device)
    right = torch.einsum("np,n,nbk->pbk", centred, weights, scores)
    solution: Tensor = torch.linalg.solve(left, right.flatten(1))
    return solution.reshape(right.shape).movedim(0, -1)


@METHODS.register("kernel_shap")
class KernelSHAP(MaskingMethod):
    """Shapley values of patches, by a weighted regression.

    Shapley values of squares, by a regression weighted with the Shapley kernel. They sum to the score of the image
    minus that of the image with everything hidden. Where all combinations of squares fit into the samples, all are
    taken and the values are exact; otherwise combinations are drawn by the kernel, each followed by its complement.
    Each value is divided among the pixels of its square.

    Args:
        model: any module that maps inputs to logits.
        samples: combinations of squares.
        seed: the same seed draws the same combinations, whatever the batch and the chunk.
        patch: side of the squares in pixels; the model's own patches, or a 14th of the image where these are tiny.
        score: the class's "logit", or its "probability"; other targets are their own number.
        options: ``baseline``, ``score``, ``chunk`` and ``autocast``, as for every `MaskingMethod`.
    """

    info = MethodInfo(paper="Lundberg and Lee, NeurIPS 2017", passes="2 + T forward", unit="logit")
    _budget_option = ("samples", 2)
    samples: Count = 2048
    seed: int = 0
    patch: Count | None = None
    score: Score = field(default="logit", kw_only=True)

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        squares = Squares.of(self.model, images, self.patch)
        target, clean = score_images(self, images, target, pass_size, self.score)  # [b, K]
        rows, weights = (part.to(images.device, precise_dtype(images.device)) for part in self.rows(squares.count))
        hidden = torch.zeros_like(rows[:1]) if len(rows) else rows.new_zeros(1, squares.count)
        empty, *scores = _score_squares(self, images, target, pass_size, squares, torch.cat([hidden, rows]))
        rise = (clean.to(empty.dtype) - empty).unsqueeze(-1)  # [b, K, 1]
        values = shapley_regression(rows, weights, torch.stack(scores) - empty, rise) if scores else rise
        return to_explanation(squares.spread(values), images, target)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return which of the squares each combination shows, ``[T, count]``, and its weight, ``[T]``."""
        if count <= 32 and 2**count - 2 <= self.samples:
            numbers = torch.arange(1, 2**count - 1).unsqueeze(1)
            every = (numbers >> torch.arange(count) & 1).to(torch.float64)
            sizes = every.sum(1).long().tolist()
            kernel = [(count - 1) / (math.comb(count, size) * size * (count - size)) for size in sizes]
            return every, torch.tensor(kernel, dtype=torch.float64)
        drawn = [self._draw(count, index // 2) for index in range(self.samples)]
        paired = [1 - row if index % 2 else row for index, row in enumerate(drawn)]
        return torch.stack(paired), torch.ones(self.samples, dtype=torch.float64)

    def _draw(self, count: int, index: int) -> Tensor:
        """Draw a size with the kernel's probability, then any combination of that size."""
        generator = sample_generator(self.seed, index, "noise")
        sizes = torch.arange(1, count, dtype=torch.float64)
        size = 1 + int(torch.multinomial(1 / (sizes * (count - sizes)), 1, generator=generator))
        row = torch.zeros(count, dtype=torch.float64)
        row[torch.randperm(count, generator=generator)[:size]] = 1
        return row


def shapley_regression(rows: Tensor, weights: Tensor, scores: Tensor, rise: Tensor) -> Tensor:
    """Return the values of the squares that fit best among those that add up to the rise: ``[b, K, P]``.

    Args:
        rows: which squares a combination shows, ``[T, P]``.
        weights: of the combinations, ``[T]``.
        scores: the score of each, minus that of nothing, ``[T, b, K]``.
        rise: the score of the whole image minus that of nothing, ``[b, K, 1]``.
    """
    # With fewer rows than squares, the pseudo-inverse gives the smallest values.
    inverse: Tensor = torch.linalg.pinv(rows.T * weights @ rows, hermitian=True)
    free = torch.einsum("pq,nq,n,nbk->bkp", inverse, rows, weights, scores)
    lever = inverse.sum(1)  # by how much each value moves where the sum is to change
    return free + (rise - free.sum(-1, keepdim=True)) * lever / lever.sum()


def _score_squares(
    method: LIME | KernelSHAP, images: Tensor, target: Target, pass_size: PassSize, squares: Squares, rows: Tensor
) -> Tensor:
    """Score images of which some squares are shown ``[n, P]``: ``[n, b, K]`` in the widest type."""

    def masks(start: int, stop: int) -> Tensor:
        return squares.masks(rows[start:stop]).unsqueeze(1)  # [n, 1, H, W]

    parts = method._score_under_masks(images, target, pass_size, masks, len(rows))
    return torch.cat([scores for _, scores in parts]).to(precise_dtype(images.device))
