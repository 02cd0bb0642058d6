"""What the model still sees when pixels are taken away or given back in the order of a map."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit.errors import InputError, OptionError
from dave_vit.metrics.base import METRICS, Case, Metric, Scores

Model = Callable[[Tensor], Tensor]
Order = Literal["least", "most"]
Baseline = Literal["zero", "black", "blur", "mean"]
Score = Literal["probability", "accuracy"]
Protocol = Literal["paper", "official", "chefer"]

PAPER_FRACTIONS = tuple(i / 20 for i in range(21))


@dataclass(frozen=True)
class Perturbation:
    """How pixels are removed.

    Attributes:
        fractions: shares of the pixels that are removed, one forward pass each.
        order: "least" or "most" important first.
        baseline: what a removed pixel becomes: "zero" (of the preprocessed tensor), "black" (zero before
            normalisation), "blur" (Gaussian, 31 pixels, sigma 7, zeros outside) or "mean" (of the image, per channel).
        score: the target's softmax "probability", or "accuracy": 1 where the target is the predicted class.
        black: the preprocessed value of a black pixel, one number per channel; needed for "black" alone.
        seed: equal pixels are ranked by lot, the same lot for every map.
    """

    fractions: Sequence[float] = PAPER_FRACTIONS
    order: Order = "least"
    baseline: Baseline = "zero"
    score: Score = "probability"
    black: Sequence[float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("order", Order), ("baseline", Baseline), ("score", Score)):
            if getattr(self, name) not in get_args(kind):
                raise OptionError(f"{name} {getattr(self, name)!r}; expected one of {', '.join(get_args(kind))}")
        if len(self.fractions) < 2 or list(self.fractions) != sorted(set(self.fractions)):
            raise OptionError(f"fractions {list(self.fractions)}; expected two or more, rising")
        if self.fractions[0] < 0 or self.fractions[-1] > 1:
            raise OptionError(f"fractions from {self.fractions[0]} to {self.fractions[-1]}; expected 0 to 1")
        if self.baseline == "black" and self.black is None:
            raise OptionError(
                "baseline 'black' needs the value of a black pixel; give black=(-mean / std of each channel)"
            )


def protocol(name: Protocol, pixels: int, black: Sequence[float] | None = None) -> Perturbation:
    """Published settings, to the pixel.

    - "paper": the least important first, 0 to 100 % in 20 steps, zero.
    - "official": the DAVE authors' public code: the least important first, up to 90 % in 128 equal steps of whole
      pixels and what they leave over, blur. It scores images that are recognised with more than 0.9.
    - "chefer": Chefer's code: the most important first, 10 to 90 %, black, top-1 accuracy.

    Args:
        name: of the protocol.
        pixels: of an image, H * W.
        black: the preprocessed value of a black pixel, one number per channel; needed for "chefer".
    """
    if name == "official":
        most = int(0.9 * pixels)
        step = max(1, most // 128)
        counts = sorted({*range(0, most + 1, step), most})
        return Perturbation(tuple(count / pixels for count in counts), baseline="blur")
    if name == "chefer":
        counts = [int(pixels * tenth / 10) for tenth in range(1, 10)]
        return Perturbation(tuple(count / pixels for count in counts), "most", "black", "accuracy", black)
    if name != "paper":
        raise OptionError(f"protocol {name!r}; expected one of {', '.join(get_args(Protocol))}")
    return Perturbation()


@torch.no_grad()
def deletion(model: Model, inputs: Tensor, maps: Tensor, target: Tensor, how: Perturbation | None = None) -> Tensor:
    """The curve of the score while pixels are removed in the order of the map: [B,steps].

    One sort and one batched forward pass per fraction.

    Args:
        model: maps inputs to logits.
        inputs: preprocessed images [B,C,H,W].
        maps: [B,H,W], ranked with their sign.
        target: classes [B].
        how: fractions, order, baseline and score.

    Returns:
        [B,steps]; NaN for a map with a value that is not finite.
    """
    how = how or Perturbation()
    check_batch(inputs, maps, target)
    rank = ranks(maps, how)  # [B,H,W]
    background = baseline_colours(inputs, how).expand_as(inputs)
    pixels = rank[0].numel()
    columns = []
    for fraction in how.fractions:
        removed = (rank < round(fraction * pixels))[:, None].to(inputs.dtype)  # [B,1,H,W]
        seen = torch.lerp(
            inputs, background, removed
        )  # exact at 0 and 1; a where of scattered pixels takes 7 times as long
        columns.append(class_score(model(seen), target, how.score))
    finite = maps.isfinite().flatten(1).all(1)
    return torch.where(finite[:, None], torch.stack(columns, 1), torch.nan)


def insertion(model: Model, inputs: Tensor, maps: Tensor, target: Tensor, how: Perturbation | None = None) -> Tensor:
    """The curve while pixels are put back onto the baseline, the most important first: [B,steps].

    Column i has the share ``how.fractions[i]`` of the pixels back; ``how.order`` says which come first. What remains
    after deleting the least important share 1 - f are the most important f, so this is deletion read backwards.
    """
    how = how or Perturbation(order="most", baseline="blur")
    back = Perturbation(
        tuple(1 - fraction for fraction in reversed(how.fractions)),
        "most" if how.order == "least" else "least",
        how.baseline,
        how.score,
        how.black,
        how.seed,
    )
    return deletion(model, inputs, maps, target, back).flip(1)


def area(curve: Tensor, fractions: Sequence[float]) -> Tensor:
    """Mean height of curves [B,steps] over the range of the fractions (trapezoids): [B]."""
    at = torch.tensor(fractions, dtype=curve.dtype, device=curve.device)
    return torch.trapezoid(curve, at, dim=1) / (at[-1] - at[0])


def gaussian_blur(images: Tensor, size: int = 31, sigma: float = 7.0) -> Tensor:
    """Separable Gaussian over [B,C,H,W] with zeros outside, as the DAVE authors' public code blurs."""
    at = torch.arange(size, dtype=images.dtype, device=images.device) - size // 2
    kernel = torch.exp(-at.square() / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    flat = images.flatten(0, 1)[:, None]  # [B*C,1,H,W]
    rows = F.conv2d(flat, kernel[None, None, None, :], padding=(0, size // 2))
    return F.conv2d(rows, kernel[None, None, :, None], padding=(size // 2, 0)).reshape(images.shape)


def ranks(maps: Tensor, how: Perturbation) -> Tensor:
    """When each pixel is removed: 0 first. Shuffled before a stable sort, so that equal pixels follow no pattern."""
    flat = maps.flatten(1)  # [B,N]
    lot = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(how.seed)).to(flat.device)
    sorting = flat[:, lot].sort(dim=1, descending=how.order == "most", stable=True)
    order = lot[sorting.indices]  # [B,N], the pixel at each place
    places = torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places).view_as(maps)


def baseline_colours(inputs: Tensor, how: Perturbation) -> Tensor:
    """What removed pixels become; broadcasts over [B,C,H,W]."""
    if how.baseline == "zero":
        return inputs.new_zeros(())
    if how.baseline == "blur":
        return gaussian_blur(inputs)
    if how.baseline == "mean":
        return inputs.mean((2, 3), keepdim=True)
    black = inputs.new_tensor(how.black)
    if len(black) != inputs.shape[1]:
        raise OptionError(f"black has {len(black)} values; expected one per channel, {inputs.shape[1]}")
    return black[None, :, None, None]


def class_score(logits: Tensor, target: Tensor, score: Score) -> Tensor:
    """[B]."""
    if score == "accuracy":
        return (logits.argmax(1) == target).to(torch.float32)
    return logits.float().softmax(1).gather(1, target[:, None])[:, 0]


def check_batch(inputs: Tensor, maps: Tensor, target: Tensor) -> None:
    """Refuse maps or targets that do not fit the images."""
    shape = (len(inputs), *inputs.shape[2:])
    if inputs.ndim != 4 or tuple(maps.shape) != shape or tuple(target.shape) != shape[:1]:
        given = f"inputs {list(inputs.shape)}, maps {list(maps.shape)}, target {list(target.shape)}"
        raise InputError(f"{given}; expected [B,C,H,W], [B,H,W] and [B]")


class _Curve(Metric):
    """A metric that sums a curve up by its area."""

    axis = "share of the pixels"

    @abstractmethod
    def how(self, pixels: int, black: Sequence[float] | None) -> Perturbation:
        """The settings for images of so many pixels."""

    def score(self, case: Case) -> Scores:
        """[B] with curves."""
        how = self.how(case.inputs.shape[2] * case.inputs.shape[3], case.black)
        curve = self._curve(case, how)
        return Scores(area(curve, how.fractions), curve, how.fractions)

    @abstractmethod
    def _curve(self, case: Case, how: Perturbation) -> Tensor: ...


@METRICS.register("deletion")
class Deletion(_Curve):
    """Pixel deletion: how the target's score holds while pixels go.

    Args:
        protocol: "paper", "official" or "chefer"; the following arguments change single points of it.
        steps: equal steps from 0 to 100 %.
        order: "least" or "most" important first.
        baseline: "zero", "black", "blur" or "mean".
        score: "probability" or "accuracy".
        seed: of the lot among equal pixels.
    """

    summary = "Mean score of the target while pixels are removed, the least important first."

    def __init__(
        self,
        protocol: Protocol = "paper",
        steps: int | None = None,
        order: Order | None = None,
        baseline: Baseline | None = None,
        score: Score | None = None,
        seed: int = 0,
    ) -> None:
        self.protocol: Protocol = protocol
        given = {"order": order, "baseline": baseline, "score": score, "seed": seed}
        self._changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if steps is not None:
            self._changes["fractions"] = equal_steps(steps)
        self.higher_is_better = self.how(100, black=(0.0,)).order == "least"  # impossible options are refused here

    def how(self, pixels: int, black: Sequence[float] | None) -> Perturbation:
        """The settings for images of so many pixels."""
        return replace(protocol(self.protocol, pixels, black), black=black, **self._changes)

    def _curve(self, case: Case, how: Perturbation) -> Tensor:
        return deletion(case.model, case.inputs, case.maps, case.target, how)


@METRICS.register("insertion")
class Insertion(_Curve):
    """Insertion: how the target's score rises while pixels return.

    Args:
        steps: equal steps from 0 to 100 %.
        order: "most" or "least" important first.
        baseline: what they return to: "blur", "zero", "black" or "mean".
        score: "probability" or "accuracy".
        seed: of the lot among equal pixels.
    """

    summary = "Mean score of the target while pixels return to a blurred image, the most important first."

    def __init__(
        self,
        steps: int = 20,
        order: Order = "most",
        baseline: Baseline = "blur",
        score: Score = "probability",
        seed: int = 0,
    ) -> None:
        self._how = Perturbation(equal_steps(steps), order, baseline, score, (0.0,), seed)
        self.higher_is_better = order == "most"

    def how(self, pixels: int, black: Sequence[float] | None) -> Perturbation:
        """The settings for images of so many pixels."""
        return replace(self._how, black=black)

    def _curve(self, case: Case, how: Perturbation) -> Tensor:
        return insertion(case.model, case.inputs, case.maps, case.target, how)


def equal_steps(steps: int) -> tuple[float, ...]:
    """Shares from 0 to 1."""
    if steps < 1:
        raise OptionError(f"{steps} steps; expected 1 or more")
    return tuple(i / steps for i in range(steps + 1))
