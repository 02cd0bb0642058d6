"""Deletion and insertion: the model's score while pixels are removed or restored in the order of a map."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.schema import Checked, Count, check_choice
from dave_vit.errors import InputError, OptionError
from dave_vit.maps import gaussian_weights
from dave_vit.metrics.base import METRICS, Case, Metric, Scores

Model = Callable[[Tensor], Tensor]
Order = Literal["least", "most"]
Baseline = Literal["zero", "black", "blur", "mean"]
Score = Literal["probability", "accuracy"]
Protocol = Literal["paper", "official", "chefer"]

PAPER_FRACTIONS = tuple(i / 20 for i in range(21))


@dataclass(frozen=True)
class Perturbation(Checked):
    """How pixels are removed.

    Attributes:
        fractions: fractions of the pixels to remove, one forward pass each.
        order: "least" or "most" important first.
        baseline: value of a removed pixel: "zero" (of the preprocessed tensor), "black" (zero before normalisation),
            "blur" (Gaussian, 31 pixels, sigma 7, zeros outside) or "mean" (of the image, per channel).
        score: the target's softmax "probability", or "accuracy": 1 where the target is the predicted class.
        black: preprocessed value of a black pixel, one number per channel; needed for "black" alone.
        seed: seed of the random order of equal pixels, the same for every map.
    """

    fractions: Sequence[float] = PAPER_FRACTIONS
    order: Order = "least"
    baseline: Baseline = "zero"
    score: Score = "probability"
    black: Sequence[float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.fractions) < 2 or list(self.fractions) != sorted(set(self.fractions)):
            raise OptionError(f"fractions {list(self.fractions)}; expected two or more, rising")
        if self.fractions[0] < 0 or self.fractions[-1] > 1:
            raise OptionError(f"fractions from {self.fractions[0]} to {self.fractions[-1]}; expected 0 to 1")
        if self.baseline == "black" and self.black is None:
            raise OptionError(
                "baseline 'black' needs the value of a black pixel; give black=(-mean / std of each channel)"
            )


def protocol(name: Protocol, pixels: int, black: Sequence[float] | None = None) -> Perturbation:
    """Return published settings, exact to the pixel.

    - "paper": the least important first, 0 to 100 % in 20 steps, zero.
    - "official": the DAVE authors' public code: the least important first, up to 90 % in 128 equal steps of whole
      pixels plus the remainder, blur. That code scores images recognised with more than 0.9.
    - "chefer": Chefer's code: the most important first, 10 to 90 %, black, top-1 accuracy.

    Args:
        name: name of the protocol.
        pixels: number of pixels of an image, H * W.
        black: preprocessed value of a black pixel, one number per channel; needed for "chefer".
    """
    check_choice("protocol", name, get_args(Protocol))
    if name == "official":
        most = int(0.9 * pixels)
        counts = sorted({*range(0, most + 1, max(1, most // 128)), most})
        return Perturbation(tuple(count / pixels for count in counts), baseline="blur")
    if name == "chefer":
        counts = [int(pixels * tenth / 10) for tenth in range(1, 10)]
        return Perturbation(tuple(count / pixels for count in counts), "most", "black", "accuracy", black)
    return Perturbation()


@torch.no_grad()
def deletion(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Tensor,
    perturbation: Perturbation | None = None,
    regions: Tensor | None = None,
) -> Tensor:
    """Compute the curve of the score while pixels or regions are removed in the order of the map: [B,steps].

    One sort and one batched forward pass per fraction.

    Args:
        model: maps inputs to logits.
        inputs: preprocessed images [B,C,H,W].
        maps: [B,H,W], ranked with their sign.
        target: classes [B].
        perturbation: fractions, order, baseline and score.
        regions: index of each pixel's region, [H,W], from 0 on without gaps; regions are removed in the order of their
            mean in the map. Single pixels by default.

    Returns:
        [B,steps]; NaN for a map with a value that is not finite.
    """
    perturbation = perturbation or Perturbation()
    check_batch(inputs, maps, target)
    remove = pixel_remover(inputs, perturbation)
    if regions is None:
        return removal_curve(model, target, maps, perturbation, lambda removed, step: remove(removed))
    means = region_means(maps, regions)  # [B,R]
    return removal_curve(model, target, means, perturbation, lambda removed, step: remove(removed[:, regions]))


def region_means(maps: Tensor, regions: Tensor) -> Tensor:
    """Return the mean of maps [B,H,W] in each region [H,W]: [B,R]."""
    index = regions.flatten()
    sums = maps.new_zeros(len(maps), int(index.max()) + 1).index_add(1, index, maps.flatten(1))
    return sums / torch.bincount(index).to(maps.dtype)


def insertion(
    model: Model, inputs: Tensor, maps: Tensor, target: Tensor, perturbation: Perturbation | None = None
) -> Tensor:
    """Compute the curve while pixels are restored onto the baseline, the most important first: [B,steps].

    Column i has the fraction ``perturbation.fractions[i]`` of the pixels restored, first those that
    ``perturbation.order`` names. After deleting the least important 1 - f, the most important f remain, so this is
    deletion read backwards.
    """
    perturbation = perturbation or Perturbation(order="most", baseline="blur")
    fractions = tuple(1 - fraction for fraction in reversed(perturbation.fractions))
    reverse = replace(perturbation, fractions=fractions, order="most" if perturbation.order == "least" else "least")
    return deletion(model, inputs, maps, target, reverse).flip(1)


@torch.no_grad()
def removal_curve(
    model: Model, target: Tensor, salience: Tensor, perturbation: Perturbation, remove: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Compute the target's score after each fraction of pixels or regions is removed: [B,steps].

    Args:
        model: maps inputs to logits.
        target: classes [B].
        salience: importance of pixels [B,H,W] or regions [B,R].
        perturbation: fractions, order and score.
        remove: from what is removed, a mask shaped as ``salience``, and the index of the step to images [B,C,H,W].

    Returns:
        [B,steps]; NaN where the salience is not finite.
    """
    rank = ranks(salience, perturbation)
    columns = []
    for step, fraction in enumerate(perturbation.fractions):
        removed = rank < round(fraction * rank[0].numel())
        columns.append(class_score(model(remove(removed, step)), target, perturbation.score))
    finite = salience.isfinite().flatten(1).all(1, keepdim=True)
    return torch.where(finite, torch.stack(columns, 1), torch.nan)


def pixel_remover(inputs: Tensor, perturbation: Perturbation) -> Callable[[Tensor], Tensor]:
    """Return a function from masks [B,H,W] to the inputs with masked pixels at the baseline, [B,C,H,W]."""
    background = baseline_colours(inputs, perturbation).expand_as(inputs)
    # lerp is exact at 0 and 1; a where of scattered pixels takes 7 times as long
    return lambda removed: torch.lerp(inputs, background, removed[:, None].to(inputs.dtype))


def area(curve: Tensor, fractions: Sequence[float]) -> Tensor:
    """Return the mean height of curves [B,steps] over the range of the fractions (trapezoids): [B]."""
    at = torch.tensor(fractions, dtype=curve.dtype, device=curve.device)
    return torch.trapezoid(curve, at, dim=1) / (at[-1] - at[0])


def gaussian_blur(images: Tensor, size: int = 31, sigma: float = 7.0) -> Tensor:
    """Blur images [B,C,H,W] by a separable Gaussian with zeros outside, as the DAVE authors' public code does."""
    kernel = gaussian_weights(size, sigma, images)
    flat = images.flatten(0, 1)[:, None]  # [B*C,1,H,W]
    rows = F.conv2d(flat, kernel[None, None, None, :], padding=(0, size // 2))
    return F.conv2d(rows, kernel[None, None, :, None], padding=(size // 2, 0)).reshape(images.shape)


def ranks(importance: Tensor, perturbation: Perturbation) -> Tensor:
    """Return the removal rank of each entry of [B,...], 0 first.

    Entries are shuffled before a stable sort, so that equal ones follow no spatial pattern.
    """
    flat = importance.flatten(1)  # [B,N]
    shuffle = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(perturbation.seed)).to(flat.device)
    sorting = flat[:, shuffle].sort(dim=1, descending=perturbation.order == "most", stable=True)
    order = shuffle[sorting.indices]  # [B,N], the entry at each rank
    positions = torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, positions).view_as(importance)


def baseline_colours(inputs: Tensor, perturbation: Perturbation) -> Tensor:
    """Return the values of removed pixels; they broadcast over [B,C,H,W]."""
    if perturbation.baseline == "zero":
        return inputs.new_zeros(())
    if perturbation.baseline == "blur":
        return gaussian_blur(inputs)
    if perturbation.baseline == "mean":
        return inputs.mean((2, 3), keepdim=True)
    black = inputs.new_tensor(perturbation.black)
    if len(black) != inputs.shape[1]:
        raise OptionError(f"black has {len(black)} values; expected one per channel, {inputs.shape[1]}")
    return black[None, :, None, None]


def class_score(logits: Tensor, target: Tensor, score: Score) -> Tensor:
    """Return the probability or the accuracy of the targets: [B,classes] -> [B]."""
    if score == "accuracy":
        return (logits.argmax(1) == target).to(torch.float32)
    return logits.float().softmax(1).gather(1, target[:, None])[:, 0]


def check_batch(inputs: Tensor, maps: Tensor, target: Tensor) -> None:
    """Raise an InputError if the shapes of maps or targets do not match the images."""
    shape = (len(inputs), *inputs.shape[2:])
    if inputs.ndim != 4 or tuple(maps.shape) != shape or tuple(target.shape) != shape[:1]:
        shapes = f"inputs {list(inputs.shape)}, maps {list(maps.shape)}, target {list(target.shape)}"
        raise InputError(f"{shapes}; expected [B,C,H,W], [B,H,W] and [B]")


def equal_steps(steps: int) -> tuple[float, ...]:
    """Return ``steps + 1`` fractions from 0 to 1 at equal distances."""
    return tuple(i / steps for i in range(steps + 1))


@METRICS.register("deletion")
class Deletion(Metric):
    """Pixel deletion: the target's score while pixels are removed.

    Args:
        protocol: "paper", "official" or "chefer"; the other arguments override single settings of it.
        steps: equal steps from 0 to 100 %.
        order: "least" or "most" important first.
        baseline: "zero", "black", "blur" or "mean".
        score: "probability" or "accuracy".
        seed: seed of the random order of equal pixels.
    """

    summary = "Mean score of the target while pixels are removed, the least important first."
    axis = "share of the pixels"
    bounds = (0.0, 1.0)
    curve: ClassVar[Callable[..., Tensor]] = staticmethod(deletion)

    def __init__(
        self,
        protocol: Protocol = "paper",
        steps: Count | None = None,
        order: Order | None = None,
        baseline: Baseline | None = None,
        score: Score | None = None,
        seed: int = 0,
    ) -> None:
        self.protocol: Protocol = protocol
        fractions = None if steps is None else equal_steps(steps)
        options = {"fractions": fractions, "order": order, "baseline": baseline, "score": score, "seed": seed}
        self._overrides: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        # Building the settings here also refuses impossible options at once.
        self.higher_is_better = self.perturbation(100, black=(0.0,)).order == "least"

    def perturbation(self, pixels: int, black: Sequence[float] | None) -> Perturbation:
        """Return the settings for images of so many pixels."""
        return replace(protocol(self.protocol, pixels, black), black=black, **self._overrides)

    def score(self, case: Case) -> Scores:
        """Return areas [B] with curves."""
        perturbation = self.perturbation(case.size[0] * case.size[1], case.black)
        curve = self.curve(case.model, case.inputs, case.maps, case.target, perturbation)
        return Scores(area(curve, perturbation.fractions), curve, perturbation.fractions)


@METRICS.register("insertion")
class Insertion(Deletion):
    """Insertion: the target's score while pixels are restored; computed as deletion read backwards.

    Args:
        steps: equal steps from 0 to 100 %.
        order: "most" or "least" important first.
        baseline: the image they are restored onto: "blur", "zero", "black" or "mean".
        score: "probability" or "accuracy".
        seed: seed of the random order of equal pixels.
    """

    summary = "Mean score of the target while pixels return to a blurred image, the most important first."
    curve = staticmethod(insertion)

    def __init__(
        self,
        steps: Count = 20,
        order: Order = "most",
        baseline: Baseline = "blur",
        score: Score = "probability",
        seed: int = 0,
    ) -> None:
        super().__init__("paper", steps, order, baseline, score, seed)
        self.higher_is_better = order == "most"
