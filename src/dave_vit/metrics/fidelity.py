"""Infidelity, sensitivity-n, single deletion, SaCo: whether sums of a map over pixels predict the fall of the score."""

from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit._internal.schema import Bounds, Count
from dave_vit.metrics.base import CONSTANT, METRICS, Case, Metric, Scores
from dave_vit.metrics.perturbation import Baseline, Perturbation, Score, check_batch, class_score, pixel_remover, ranks
from dave_vit.metrics.removal import square_regions
from dave_vit.metrics.stability import correlation, mean_ranks
from dave_vit.neighborhood.draws import sample_generator

Output = Literal["logit", "probability"]
Several = Annotated[int, Bounds(at_least=2)]


@torch.no_grad()
def score_drops(model: nn.Module, inputs: Tensor, target: Tensor, masks: Tensor, of: Output = "logit") -> Tensor:
    """Return how far the target's score falls when the pixels under each mask [n,H,W] become zero: [B,n]."""

    def score(images: Tensor) -> Tensor:
        logits: Tensor = model(images).to(precise_dtype(images.device))
        return (logits.softmax(1) if of == "probability" else logits).gather(1, target[:, None])

    whole = score(inputs)  # [B,1]
    return torch.cat([whole - score(inputs * ~mask) for mask in masks], 1)


def masked_sums(maps: Tensor, masks: Tensor) -> Tensor:
    """Return the sums of maps [B,H,W] under each mask [n,H,W]: [B,n]."""
    wide = precise_dtype(maps.device)
    return maps.flatten(1).to(wide) @ masks.flatten(1).to(maps.device, wide).T


def infidelity(sums: Tensor, drops: Tensor, *, scaled: bool = True) -> Tensor:
    """Return the mean squared difference of the map's sums and the drops of the score, [B,n] each: [B].

    Args:
        sums: sums of the map over the hidden pixels.
        drops: how far the score fell.
        scaled: multiply each map by the number that minimises its infidelity, so that the map's unit does not matter.
    """
    if scaled:
        size = sums.square().sum(1, keepdim=True)
        sums = sums * torch.where(size > 0, (sums * drops).sum(1, keepdim=True) / size, 0)
    return (sums - drops).square().mean(1)


def sensitivity(sums: Tensor, drops: Tensor) -> Tensor:
    """Return Pearson's coefficient of sums and drops, [B,n] each: [B]; NaN where one is constant."""
    return correlation(sums.unsqueeze(2), drops.unsqueeze(2))


def random_squares(count: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Draw squares at random positions, a 14th to half of the shorter side long: [n,H,W], true inside."""
    masks = torch.zeros(count, *size, dtype=torch.bool)
    for index, mask in enumerate(masks):
        generator = sample_generator(seed, index, "spatial")
        side = int(torch.randint(max(1, min(size) // 14), max(1, min(size) // 2) + 1, (1,), generator=generator))
        top, left = (int(torch.randint(extent - side + 1, (1,), generator=generator)) for extent in size)
        mask[top : top + side, left : left + side] = True
    return masks


def random_pixels(share: float, count: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Draw ``count`` random sets of a share of the pixels: [n,H,W], true inside."""
    pixels = size[0] * size[1]
    masks = torch.zeros(count, pixels, dtype=torch.bool)
    for index, mask in enumerate(masks):
        order = torch.randperm(pixels, generator=sample_generator(seed, index, "noise"))
        mask[order[: max(1, round(share * pixels))]] = True
    return masks.view(count, *size)


class _FidelityMetric(Metric):
    """Base of metrics that compare sums of a map under masks with drops of the score.

    Args:
        of: the drop of the target's "logit" or "probability".
        images: number of images of the data set to score; each costs one pass per mask.
    """

    unscored = CONSTANT
    of: Output = "logit"
    images: Count | None = 32

    def _sums_and_drops(self, case: Case, masks: Tensor) -> tuple[Tensor, Tensor]:
        check_batch(case.inputs, case.maps, case.target)
        masks = masks.to(case.inputs.device)
        return masked_sums(case.maps, masks), score_drops(case.model, case.inputs, case.target, masks, self.of)


@METRICS.register("infidelity")
class Infidelity(_FidelityMetric):
    """Infidelity (Yeh et al., 2019) of removed squares.

    Args:
        samples: number of squares, removed one at a time.
        of: the drop of the target's "logit" or "probability".
        scaled: give every map the unit that suits it best.
        images: number of images of the data set to score; each costs one pass per square.
        seed: seed of the squares, the same for every image.
    """

    summary = "Mean squared difference of the map's sum over a square and the fall of the score without it."
    higher_is_better = False

    samples: Several = 50
    seed: int = 0
    scaled: bool = True

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        sums, drops = self._sums_and_drops(case, random_squares(self.samples, case.size, self.seed))
        return Scores(infidelity(sums, drops, scaled=self.scaled))


@METRICS.register("sensitivity_n")
class SensitivityN(_FidelityMetric):
    """Sensitivity-n (Ancona et al., 2018): correlation over random sets of n pixels, for several n.

    Args:
        samples: sets of each size.
        sizes: number of sizes, from 1 to 80 % of the pixels in equal ratios.
        of: the drop of the target's "logit" or "probability".
        images: number of images of the data set to score; each costs one pass per set.
        seed: seed of the sets, the same for every image.
    """

    summary = "Correlation of the map's sum over random pixels with the fall of the score without them."
    bounds = (-1.0, 1.0)
    axis = "share of the pixels"

    samples: Several = 100
    sizes: Count = 6
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shares = tuple(0.01 * 80 ** (step / max(1, self.sizes - 1)) for step in range(self.sizes))

    def score(self, case: Case) -> Scores:
        """Return the mean over the sizes, [B], with curves over the sizes."""
        sets = (random_pixels(share, self.samples, case.size, self.seed) for share in self.shares)
        curve = torch.stack([sensitivity(*self._sums_and_drops(case, masks)) for masks in sets], 1)
        return Scores(curve.mean(1), curve, self.shares)


@METRICS.register("single_deletion")
class SingleDeletion(_FidelityMetric):
    """Correlation with single-patch deletion: the score of IDSDS (Hesse et al., 2024) without its fine-tuning.

    Published for models that were fine-tuned on images without patches, so that a missing patch is in their domain. On
    any other model part of a drop may come from the hole itself.

    Args:
        patches: squares along the shorter side of the image, removed one at a time.
        of: the drop of the target's "logit" or "probability".
        images: number of images of the data set to score; all by default.
    """

    summary = "Rank correlation of the map's sum over a patch with the fall of the score without it."
    bounds = (-1.0, 1.0)

    patches: Several = 4
    images: Count | None = None

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        regions = square_regions(case.size, self.patches)
        masks = regions == torch.arange(int(regions.max()) + 1)[:, None, None]  # [patches,H,W]
        sums, drops = (mean_ranks(part.unsqueeze(2)) for part in self._sums_and_drops(case, masks))
        return Scores(correlation(sums, drops))


def saco(salience: Tensor, drops: Tensor) -> Tensor:
    """Return the coefficient of groups of pixels, from the most to the least salient: [B].

    Each pair of groups counts by its difference in salience, for the map if the group with more salience matters at
    least as much, and against it otherwise.

    Args:
        salience: sum of the map over each group, falling, [B,groups].
        drops: how far the score falls without each group, [B,groups].

    Returns:
        -1 to 1; NaN where all groups have the same salience.
    """
    weight = salience.unsqueeze(2) - salience.unsqueeze(1)  # [B,groups,groups]
    agrees = drops.unsqueeze(2) >= drops.unsqueeze(1)
    weight = weight.triu(1)
    return torch.where(agrees, weight, -weight).sum((1, 2)) / weight.abs().sum((1, 2))


@torch.no_grad()
def group_drops(
    model: nn.Module, inputs: Tensor, maps: Tensor, target: Tensor, groups: int, perturbation: Perturbation
) -> tuple[Tensor, Tensor]:
    """Return the salience of groups of equally many pixels, falling, and the drops without each: [B,groups]."""
    check_batch(inputs, maps, target)
    remove, rank = pixel_remover(inputs, perturbation), ranks(maps, replace(perturbation, order="most"))
    group = rank * groups // rank[0].numel()  # [B,H,W]
    wide = maps.to(precise_dtype(maps.device))
    members = [group == number for number in range(groups)]
    salience = torch.stack([(wide * one).sum((1, 2)) for one in members], 1)
    scores = [class_score(model(images), target, perturbation.score) for images in (inputs, *map(remove, members))]
    return salience, torch.stack([scores[0] - score for score in scores[1:]], 1)


@METRICS.register("saco")
class SaCo(Metric):
    """Salience-guided faithfulness coefficient (Wu et al., 2024).

    Args:
        groups: groups of equally many pixels, in the order of the map.
        baseline: value of a removed pixel: "mean" of the image as published, "zero", "black" or "blur".
        score: "probability" or "accuracy" of the target.
        seed: seed of the random order of equal pixels.
    """

    summary = "Agreement of pairs of pixel groups in salience and in the fall of the score, weighted by salience."
    bounds = (-1.0, 1.0)
    unscored = CONSTANT

    def __init__(
        self, groups: Several = 10, baseline: Baseline = "mean", score: Score = "probability", seed: int = 0
    ) -> None:
        self.groups = groups
        self._perturbation = Perturbation(baseline=baseline, score=score, black=(0.0,), seed=seed)

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        perturbation = replace(self._perturbation, black=case.black)
        return Scores(saco(*group_drops(case.model, case.inputs, case.maps, case.target, self.groups, perturbation)))
