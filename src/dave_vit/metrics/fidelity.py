"""Whether a map's sums over hidden pixels say how far the score falls: infidelity and sensitivity-n."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.errors import OptionError
from dave_vit.metrics.base import METRICS, Case, Metric, Scores
from dave_vit.metrics.consistency import correlation
from dave_vit.metrics.perturbation import Model, check_batch
from dave_vit.neighborhood.draws import sample_generator

Fall = Literal["logit", "probability"]


@torch.no_grad()
def score_drops(model: Model, inputs: Tensor, target: Tensor, masks: Tensor, of: Fall = "logit") -> Tensor:
    """How far the target's score falls where pixels become zero under each mask [n,H,W]: [B,n]."""

    def score(seen: Tensor) -> Tensor:
        logits = model(seen).to(precise_dtype(seen.device))
        return (logits.softmax(1) if of == "probability" else logits).gather(1, target[:, None])

    whole = score(inputs)  # [B,1]
    return torch.cat([whole - score(inputs * ~mask) for mask in masks], 1)


def masked_sums(maps: Tensor, masks: Tensor) -> Tensor:
    """The sums of maps [B,H,W] under each mask [n,H,W]: [B,n]."""
    wide = precise_dtype(maps.device)
    return maps.flatten(1).to(wide) @ masks.flatten(1).to(maps.device, wide).T


def infidelity(claimed: Tensor, fallen: Tensor, *, scaled: bool = True) -> Tensor:
    """The mean squared difference of what a map claims and what happens, [B,n] each: [B].

    Args:
        claimed: sums of the map over what was hidden.
        fallen: how far the score fell.
        scaled: with the map times the number that makes it smallest, so that the unit of a map does not count.
    """
    if scaled:
        size = claimed.square().sum(1, keepdim=True)
        claimed = claimed * torch.where(size > 0, (claimed * fallen).sum(1, keepdim=True) / size, 0)
    return (claimed - fallen).square().mean(1)


def sensitivity(claimed: Tensor, fallen: Tensor) -> Tensor:
    """Pearson's coefficient of what a map claims and what happens, [B,n] each: [B]; NaN where one is constant."""
    everywhere = torch.ones_like(claimed[:1], dtype=torch.bool)
    return correlation(claimed.unsqueeze(2), fallen.unsqueeze(2), everywhere)


def random_squares(count: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Squares at random places, a 14th to half of the shorter side long: [n,H,W], true inside."""
    masks = torch.zeros(count, *size, dtype=torch.bool)
    for index, mask in enumerate(masks):
        draw = sample_generator(seed, index, "spatial")
        side = int(torch.randint(max(1, min(size) // 14), max(1, min(size) // 2) + 1, (1,), generator=draw))
        top, left = (int(torch.randint(extent - side + 1, (1,), generator=draw)) for extent in size)
        mask[top : top + side, left : left + side] = True
    return masks


def random_pixels(share: float, count: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """So many sets of a share of the pixels, at random: [n,H,W], true inside."""
    pixels = size[0] * size[1]
    masks = torch.zeros(count, pixels, dtype=torch.bool)
    for index, mask in enumerate(masks):
        order = torch.randperm(pixels, generator=sample_generator(seed, index, "noise"))
        mask[order[: max(1, round(share * pixels))]] = True
    return masks.view(count, *size)


class _OfClaims(Metric):
    """A metric of what a map claims.

    Args:
        samples: masks.
        of: the fall of the target's "logit" or "probability".
        images: how many images of the data set are used; each costs a pass a mask.
        seed: of the masks, the same for every image.
    """

    def __init__(self, samples: int, of: Fall, images: int, seed: int) -> None:
        if samples < 2 or images < 1:
            raise OptionError(f"{samples} samples on {images} images; expected 2 or more on 1 or more")
        if of not in get_args(Fall):
            raise OptionError(f"of {of!r}; expected one of {', '.join(get_args(Fall))}")
        self.samples, self.images, self.seed = samples, images, seed
        self.of: Fall = of

    def reason(self, case: Case, index: int) -> str:
        """Why a map has no score."""
        return "map is constant" if case.maps[index].isfinite().all() else "map is not finite"

    def _pairs(self, case: Case, masks: Tensor) -> tuple[Tensor, Tensor]:
        check_batch(case.inputs, case.maps, case.target)
        masks = masks.to(case.inputs.device)
        return masked_sums(case.maps, masks), score_drops(case.model, case.inputs, case.target, masks, self.of)


@METRICS.register("infidelity")
class Infidelity(_OfClaims):
    """Infidelity (Yeh et al., 2019), squares being removed.

    Args:
        samples: squares, each removed by itself.
        of: the fall of the target's "logit" or "probability".
        scaled: every map in the unit that suits it best.
        images: how many images of the data set are used; each costs a pass a square.
        seed: of the squares, the same for every image.
    """

    summary = "Mean squared difference of the map's sum over a square and the fall of the score without it."
    higher_is_better = False

    def __init__(
        self, samples: int = 50, of: Fall = "logit", images: int = 32, seed: int = 0, *, scaled: bool = True
    ) -> None:
        super().__init__(samples, of, images, seed)
        self.scaled = scaled

    @property
    def passes(self) -> int:
        """Forward passes of a map."""
        return 1 + self.samples

    def score(self, case: Case) -> Scores:
        """[B]."""
        size = (case.inputs.shape[2], case.inputs.shape[3])
        claimed, fallen = self._pairs(case, random_squares(self.samples, size, self.seed))
        return Scores(infidelity(claimed, fallen, scaled=self.scaled))


@METRICS.register("sensitivity_n")
class SensitivityN(_OfClaims):
    """Sensitivity-n (Ancona et al., 2018): correlation over random sets of n pixels, for several n.

    Args:
        samples: sets of each size.
        sizes: how many sizes, from 1 to 80 % of the pixels in equal factors.
        of: the fall of the target's "logit" or "probability".
        images: how many images of the data set are used; each costs a pass a set.
        seed: of the sets, the same for every image.
    """

    summary = "Correlation of the map's sum over random pixels with the fall of the score without them."
    axis = "share of the pixels"

    def __init__(self, samples: int = 100, sizes: int = 6, of: Fall = "logit", images: int = 32, seed: int = 0) -> None:
        super().__init__(samples, of, images, seed)
        if sizes < 1:
            raise OptionError(f"{sizes} sizes; expected 1 or more")
        self.shares = tuple(0.01 * 80 ** (step / max(1, sizes - 1)) for step in range(sizes))

    @property
    def passes(self) -> int:
        """Forward passes of a map."""
        return (1 + self.samples) * len(self.shares)

    def score(self, case: Case) -> Scores:
        """[B] with curves: the mean over the sizes."""
        size = (case.inputs.shape[2], case.inputs.shape[3])
        pairs = (self._pairs(case, random_pixels(share, self.samples, size, self.seed)) for share in self.shares)
        curve = torch.stack([sensitivity(*pair) for pair in pairs], 1)
        return Scores(curve.mean(1), curve, self.shares)
