"""Values of patches from scores with some of them hidden: LIME, Kernel SHAP, and orders that deletion rewards."""

import math
from collections.abc import Callable
from dataclasses import field, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit._internal.schema import Bounds, Count, Positive
from dave_vit.engine.targets import Target
from dave_vit.errors import import_optional
from dave_vit.methods.attention import BeyondIntuition
from dave_vit.methods.base import METHODS, MethodInfo
from dave_vit.methods.constants import to_explanation, upsample
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.masking import MaskedImages, MaskingMethod, Score, Squares
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
    width: Positive = 0.25
    ridge: Positive = 1.0

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        squares = Squares.of(self.model, images, self.patch)
        target, clean = self._score_clean(images, target, pass_size)
        rows = self.rows(squares.count).to(images.device, precise_dtype(images.device))  # [T, P]
        scores = self._mask(images, target, pass_size).score_squares(squares, rows)  # [T, b, K]
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
        target, clean = self._score_clean(images, target, pass_size)  # [b, K]
        rows, weights = (part.to(images.device, precise_dtype(images.device)) for part in self.rows(squares.count))
        hidden = torch.zeros_like(rows[:1]) if len(rows) else rows.new_zeros(1, squares.count)
        empty, *scores = self._mask(images, target, pass_size).score_squares(squares, torch.cat([hidden, rows]))
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


@METHODS.register("greedy")
class Greedy(MaskingMethod):
    """Order in which patches can go at the least cost of probability: an upper reference of deletion.

    The order in which patches are hidden if every round hides those that lower the score least. It optimises what the
    metric measures, so it shows how high deletion or insertion can get and explains nothing beyond that. Values are
    positions in the order, from 0 to 1; the patch that is hidden last has the highest.

    Args:
        model: any module that maps inputs to logits.
        rounds: each round tries every remaining patch alone, and hides an equal share of all patches.
        goal: "deletion" hides patches of the whole image; "insertion" shows patches, the best first.
        patch: side of the squares in pixels; the model's own patches, or a 14th of the image where these are tiny.
        options: ``baseline``, ``score``, ``chunk`` and ``autocast``, as for every `MaskingMethod`.
    """

    info = MethodInfo(paper="reference", passes="1 + P (R + 1) / 2 forward, of P patches in R rounds")

    rounds: Count = 14
    goal: Literal["deletion", "insertion"] = "deletion"
    patch: Count | None = None

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        squares = Squares.of(self.model, images, self.patch)
        target = self._resolve_target(images, target, pass_size)
        masked = [self._mask(images, single, pass_size) for single in target.split_classes()]
        places = [self._places(one, squares) for one in masked]  # K of [b, P]
        return to_explanation(squares.masks(torch.stack(places, 1)), images, target)

    def _places(self, masked: MaskedImages, squares: Squares) -> Tensor:
        """Return how late each square is hidden, or how early it is shown: ``[b, P]``, up to 1."""
        images, count, deleting = masked.images, squares.count, self.goal == "deletion"
        left = torch.arange(count, device=images.device).expand(len(images), count)  # of each image, [b, left]
        shown = images.new_full((len(images), count), float(deleting))
        places = torch.zeros_like(shown)
        for part in torch.arange(count).tensor_split(min(self.rounds, count)):
            rows, each = shown.expand(left.shape[1], *shown.shape), left.T.unsqueeze(2)  # [left, b, P], [left, b, 1]
            flipped = rows.scatter(2, each, 1 - rows.gather(2, each))  # each of the remaining squares alone
            scores = masked.score_squares(squares, flipped)[..., 0].T  # [b, left]
            order = left.gather(1, scores.sort(dim=1, descending=True, stable=True).indices)
            chosen, left = order[:, : len(part)], order[:, len(part) :].sort(1).values
            shown = shown.scatter(1, chosen, float(not deleting))
            value = (part + 1) / count if deleting else 1 - part / count
            places = places.scatter(1, chosen, value.to(places).expand_as(chosen))
        return places


_BLUR = 31  # pixels; the authors' Gaussian of sigma 31, cut off at 31 pixels, is as flat as a box
_MOST = 28  # most patches that one step of the search tries
_FIXED = 1e4  # weight of the ends of a curve in its fit
_DENSE_FROM = 0.005  # value from which a patch counts by its place in the order in dense maps


@METHODS.register("mda")
class MDA(MaskingMethod):
    """Order of patches by a search for the best insertion and deletion, valued by the slope of both curves.

    The order of patches that raises insertion and lowers deletion most, with the slope of the curves as magnitude. From
    the blurred image, the search shows the patch that raises the score most until ``cutoff`` of the score is back. From
    the hidden image, it shows those of the other patches that raise it least, one after the other; the last of them
    come next in the order. Each step tries the patches that ``beyond_intuition`` ranks next. The curves of the whole
    order are averaged and made convex; their slope is the magnitude of each patch.

    Args:
        model: a model with softmax attention among all tokens.
        cutoff: share of the score at which the search for insertion ends.
        density: 0 for the sparse map, 1 for the dense one, in which most patches count by their place in the order.
        patch: side of the squares in pixels; the model's own patches, or a 14th of the image where these are tiny.
        options: ``baseline``, ``score``, ``chunk`` and ``autocast``, as for every `MaskingMethod`.
    """

    info = MethodInfo(
        paper="Walker et al., ICLR 2025",
        passes="26 + 2 P + S forward, 21 backward, of P patches and S tries of the search",
    )

    cutoff: Annotated[float, Bounds(above=0, at_most=1)] = 0.9
    density: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.0
    patch: Count | None = None

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        squares = Squares.of(self.model, images, self.patch)
        target = self._resolve_target(images, target, pass_size)
        ranking = BeyondIntuition(self.model, autocast=self.autocast)._explain(images, target, pass_size)
        ranks = squares.means(ranking.attribution.sum(2))  # [b, K, P]
        values = []
        for index, image in enumerate(images.split(1)):
            for single, rank in zip(target.split_classes(), ranks[index], strict=True):
                masked = self._mask(image, single.part(index, index + 1), pass_size)
                values.append(self._values(masked, squares, rank))
        grids = torch.stack(values).reshape(len(images), -1, *squares.grid)  # [b, K, h, w]
        return to_explanation(upsample(grids.to(images.dtype), images.shape[-2:]), images, target)

    def _values(self, masked: MaskedImages, squares: Squares, rank: Tensor) -> Tensor:
        """Return the value of each patch of one image for one class: ``[P]``."""
        blurred, hidden = torch.nn.functional.avg_pool2d(masked.images, _BLUR, 1, _BLUR // 2), self.baseline

        def score(shown: Tensor, background: float | Tensor) -> Tensor:
            """Score the image on a background with the patches ``[n, P]`` shown: ``[n]``."""
            return replace(masked, background=background).score_squares(squares, shown)[:, 0, 0]

        best = rank.argsort(descending=True, stable=True)
        start, whole = score(torch.stack([torch.zeros_like(rank), torch.ones_like(rank)]), blurred)
        limit = start + self.cutoff * (whole - start).abs()
        first = _search(lambda shown: score(shown, blurred), best, squares.count, limit)
        rest = best[~torch.isin(best, first)].flip(0)  # the least of them first
        order = torch.cat([first, _search(lambda shown: -score(shown, hidden), rest, squares.count).flip(0)])
        steps = torch.ones(len(order) + 1, len(order), device=rank.device).tril(-1)  # patches so far, [P + 1, P]
        shown = torch.zeros_like(steps).scatter(1, order.expand_as(steps), steps)
        insertion = _normalize(score(shown, blurred), 0, -1).cummax(0).values
        deletion = _normalize(score(1 - shown, hidden), -1, 0).cummin(0).values
        slopes = -fit_convex((1 - insertion + deletion) / 2).diff()  # [P], of the patches in order
        return torch.zeros_like(slopes).scatter(0, order, self._magnitudes(slopes, squares.side**2))

    def _magnitudes(self, slopes: Tensor, pixels: int) -> Tensor:
        """Return the values of patches in order from the slope of the curve at each of them."""
        places = 1 - torch.arange(1, len(slopes) + 1, device=slopes.device) / len(slopes)
        sparse = slopes / pixels + slopes * places
        dense = torch.where(sparse >= _DENSE_FROM, places.to(sparse.dtype), sparse)
        scale = sparse.max() / dense.max().clamp(min=torch.finfo(dense.dtype).tiny)
        return (1 - self.density) * sparse + self.density * dense * scale


def _search(score: Callable[[Tensor], Tensor], queue: Tensor, count: int, limit: Tensor | None = None) -> Tensor:
    """Return patches in the order in which showing one more of them raises the score most.

    Args:
        score: of rows that show some of all patches, ``[n, P]`` -> ``[n]``.
        queue: patches to order ``[q]``; a step tries those in front.
        count: number of all patches, P.
        limit: score at which the search ends; all patches are ordered by default.
    """
    width, shown, chosen = min(2 * math.isqrt(count), _MOST), torch.zeros(count, device=queue.device), []
    while len(queue):
        tried = queue[:width]
        rows = shown.repeat(len(tried), 1).scatter(1, tried.unsqueeze(1), 1.0)
        scores = score(rows)
        best = int(scores.argmax())
        shown, queue = rows[best], torch.cat([queue[:best], queue[best + 1 :]])
        chosen.append(tried[best])
        if limit is not None and bool(scores[best] >= limit):
            break
    return torch.stack(chosen) if chosen else queue


def _normalize(curve: Tensor, low: int, high: int) -> Tensor:
    """Scale a curve so that its values at two indices become 0 and 1, and clip it."""
    rise = (curve[high] - curve[low]).abs()
    return ((curve - curve[low]) / torch.where(rise > 0, rise, 1)).clamp(0, 1)


def fit_convex(curve: Tensor) -> Tensor:
    """Return the falling convex curve nearest to a falling one, with the same ends: ``[n]``."""
    low, last = float(curve[-1]), len(curve) - 1
    at = torch.arange(len(curve), dtype=torch.float64)
    kinks = (1 - at.unsqueeze(1) / at[1:]).clamp(min=0)  # [n, last]: falling from 1 to 0 at each index
    ends = torch.full((1, last), _FIXED, dtype=torch.float64)  # the weights add up to the height, whatever it costs
    heights = torch.cat([curve.cpu().double() - low, (curve[:1].cpu().double() - low) * _FIXED])
    optimize = import_optional("scipy.optimize", extra="eval")
    weights, _ = optimize.nnls(torch.cat([kinks, ends]).numpy(), heights.numpy())
    return (kinks @ torch.from_numpy(weights) + low).to(curve.device, curve.dtype)
