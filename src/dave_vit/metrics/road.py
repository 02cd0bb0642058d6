"""Remove and debias: pixels that are removed are filled in from their neighbours, so that no hole gives them away."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.errors import OptionError
from dave_vit.metrics.base import METRICS, Case, Metric, Scores
from dave_vit.metrics.perturbation import Model, Order, Perturbation, Score, check_batch, class_score, ranks
from dave_vit.neighborhood.draws import sample_generator

FRACTIONS = tuple(tenth / 10 for tenth in range(1, 10))

_CLOSE = 1e-4  # what may be left of the equations, as a share of their right side
_LONGEST = 2000  # rounds until then; a hole as large as a photograph needs a few hundred
_SMALLEST = 8  # side in pixels from which on a beginning is looked for at half the size


def impute(images: Tensor, removed: Tensor) -> Tensor:
    """Images [B,C,H,W] whose removed pixels [B,H,W] are the weighted mean of their eight neighbours.

    Direct neighbours weigh 1/6 and diagonal ones 1/12. These are linear equations, one for each removed pixel; they are
    solved by conjugate gradients, for all channels of all images at once. An image without any pixel left becomes zero.
    """
    wide = images.to(working_dtype(images.dtype))
    hole = removed[:, None].to(wide.dtype).expand_as(wide)
    return _filled(wide * (1 - hole), hole).to(images.dtype)


def _filled(known: Tensor, hole: Tensor) -> Tensor:
    """What is known, zero in the holes, with the holes filled in; the same at half the size is where it begins."""
    weights = _gathered(torch.ones_like(hole))  # less than one at the border of the image

    def equations(values: Tensor) -> Tensor:
        return hole * (weights * values - _gathered(values))

    start = torch.zeros_like(known)
    if min(hole.shape[2:]) > _SMALLEST:
        share = F.avg_pool2d(1 - hole, 2, ceil_mode=True, count_include_pad=False)
        coarse = F.avg_pool2d(known, 2, ceil_mode=True, count_include_pad=False) / torch.where(share > 0, share, 1)
        half = _filled(coarse, (share == 0).to(known.dtype))
        start = hole * F.interpolate(half, scale_factor=2, mode="bilinear")[..., : hole.shape[2], : hole.shape[3]]
    return known + _solved(equations, hole * _gathered(known), start)


def _gathered(images: Tensor) -> Tensor:
    """Weighted sums of the eight neighbours, zeros outside: [B,C,H,W]."""
    rows = 2 * images
    rows[:, :, 1:] += images[:, :, :-1]
    rows[:, :, :-1] += images[:, :, 1:]
    sums = 2 * rows - 4 * images  # 1 2 1 down, then across, without the pixel itself
    sums[..., 1:] += rows[..., :-1]
    sums[..., :-1] += rows[..., 1:]
    return sums / 12


def _solved(equations: Callable[[Tensor], Tensor], right: Tensor, start: Tensor) -> Tensor:
    """Conjugate gradients, each channel [B,C] by itself."""
    enough = _CLOSE**2 * right.square().sum((2, 3), keepdim=True)
    found, left = start, right - equations(start)
    way, size = left, left.square().sum((2, 3), keepdim=True)
    for _ in range(_LONGEST):
        if bool((size <= enough).all()):
            break
        bent = equations(way)
        step = torch.where(size > enough, size / (way * bent).sum((2, 3), keepdim=True), 0)
        found, left = found + step * way, left - step * bent
        before, size = size, left.square().sum((2, 3), keepdim=True)
        way = left + torch.where(before > 0, size / before, 0) * way
    return found


@torch.no_grad()
def road(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Tensor,
    order: Order = "most",
    *,
    fractions: tuple[float, ...] = FRACTIONS,
    score: Score = "probability",
    noise: float = 0.01,
    seed: int = 0,
) -> Tensor:
    """The curve of the score while pixels are filled in, in the order of the map: [B,steps].

    Args:
        model: maps inputs to logits.
        inputs: preprocessed images [B,C,H,W].
        maps: [B,H,W], ranked with their sign.
        target: classes [B].
        order: "most" or "least" important first.
        fractions: shares of the pixels that are removed.
        score: "probability" or "accuracy" of the target.
        noise: standard deviation of what is added to pixels that were filled in.
        seed: of the noise, the same for every image, and of the lot among equal pixels.

    Returns:
        [B,steps]; NaN for a map with a value that is not finite.
    """
    check_batch(inputs, maps, target)
    rank = ranks(maps, Perturbation(fractions, order, seed=seed))  # [B,H,W]
    columns = []
    for step, fraction in enumerate(fractions):
        removed = rank < round(fraction * rank[0].numel())
        drawn = torch.randn(inputs.shape[1:], generator=sample_generator(seed, step, "noise"), device="cpu")
        seen = impute(inputs, removed) + noise * drawn.to(inputs) * removed[:, None]
        columns.append(class_score(model(seen), target, score))
    finite = maps.isfinite().flatten(1).all(1)
    return torch.where(finite[:, None], torch.stack(columns, 1), torch.nan)


@METRICS.register("road")
class ROAD(Metric):
    """Remove and debias (Rong et al., 2022): least against most important pixels, both filled in.

    Args:
        score: "probability" or "accuracy" of the target.
        noise: standard deviation of what is added to pixels that were filled in.
        images: how many images of the data set are used; all by default.
        seed: of the noise and of the lot among equal pixels.
    """

    summary = "Score with the least important pixels filled in, minus that with the most important, over two."
    axis = "share of the pixels"

    def __init__(
        self, score: Score = "probability", noise: float = 0.01, images: int | None = None, seed: int = 0
    ) -> None:
        if noise < 0 or (images is not None and images < 1):
            raise OptionError(f"noise {noise} on {images} images; expected 0 or more on 1 or more")
        self._score: Score = score
        self.noise, self.images, self.seed = noise, images, seed
        Perturbation(FRACTIONS, score=score)  # an impossible one is refused here

    @property
    def passes(self) -> int:
        """Forward passes of a map."""
        return 2 * len(FRACTIONS)

    def score(self, case: Case) -> Scores:
        """[B] with curves."""
        options = {"score": self._score, "noise": self.noise, "seed": self.seed}
        orders: tuple[Order, Order] = ("least", "most")
        least, most = (
            road(case.model, case.inputs, case.maps, case.target, order, **options)  # type: ignore[arg-type]
            for order in orders
        )
        curve = (least - most) / 2
        return Scores(curve.mean(1), curve, FRACTIONS)
