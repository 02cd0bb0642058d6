"""Stability and concentration: maps of moved images, of random weights, of another class; entropy and Gini index."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit._internal.schema import Count
from dave_vit.errors import InputError, OptionError
from dave_vit.maps import positive
from dave_vit.metrics.base import CONSTANT, METRICS, Case, Metric, Scores
from dave_vit.models.adapter import traits_of
from dave_vit.neighborhood import Warp, affine_matrix

_SIDE = 224  # the shifts of the paper's figure 2 are pixels of an image of this side


def small_warp(size: tuple[int, int], *, rotation: float = 5.0, shift: tuple[float, float] = (20.0, 8.0)) -> Warp:
    """Return a small rotation and shift, the same for all images of a batch.

    Args:
        size: (H, W).
        rotation: in degrees.
        shift: to the right and down, in pixels of an image of 224 pixels; scaled in proportion for others.
    """
    pixels = torch.tensor([[shift[0] * size[1] / _SIDE, shift[1] * size[0] / _SIDE]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    still = torch.zeros(1, dtype=torch.bool)
    matrix = affine_matrix(size, flip=still, rotation=rotation * one, scale=one, translation=pixels)
    return Warp(matrix, torch.zeros(1, 2, dtype=torch.int64))


def warp_images(images: Tensor, warp: Warp, *, fill: float = 0.0) -> Tensor:
    """Move all images of a batch alike, with a fill colour outside: [B,C,H,W] -> [B,C,H,W]."""
    channels = images.flatten(0, 1)[None]  # as channels of one image, which share one sampling grid
    return warp.apply(channels, fill=fill)[0].view_as(images)


def consistency(maps: Tensor, others: Tensor, warp: Warp) -> Tensor:
    """Correlate the positive parts of maps with those of moved images, moved back: [B].

    Args:
        maps: maps of the images, [B,H,W].
        others: maps of the moved images, [B,H,W].
        warp: the movement, the same for all.

    Returns:
        Pearson's coefficient over the pixels that the moved image still shows; NaN where a map is constant there or
        not finite.
    """
    if maps.ndim != 3 or maps.shape != others.shape:
        raise InputError(f"maps shaped {list(maps.shape)} and {list(others.shape)}; expected the same [B,H,W]")
    back = warp.inverse(positive(others)[None])[0]
    visible = warp.inverse(warp.apply(torch.ones_like(maps[:1])[None]))[0] > 1 - 1e-4  # untouched by the outside
    wide = precise_dtype(maps.device)
    return correlation(positive(maps).to(wide), back.to(wide), visible)


def correlation(first: Tensor, second: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return Pearson's coefficient of each pair over the pixels of a mask: [B,H,W] -> [B]; NaN if one is constant.

    ``mask`` is [B,H,W], or [1,H,W] for all; by default every pixel counts.
    """
    finite = (first.isfinite() & second.isfinite()).flatten(1).all(1)
    weight = (torch.ones_like(first[:1]) if mask is None else mask).flatten(1).to(first.dtype)
    (a, constant_a), (b, constant_b) = (_center(part.flatten(1), weight) for part in (first, second))
    product = (a * b).sum(1) / (a.square().sum(1).sqrt() * b.square().sum(1).sqrt())
    return torch.where(finite & ~constant_a & ~constant_b, product, torch.nan)


def mean_ranks(maps: Tensor) -> Tensor:
    """Return the ranks of the pixels [B,H,W], equal ones at their mean rank; NaN for a map that is not finite."""
    ordered, order = maps.flatten(1).nan_to_num().sort(1)
    first, after = (torch.searchsorted(ordered, ordered, right=right) for right in (False, True))
    middle = (first + after - 1).to(precise_dtype(maps.device)) / 2
    ranks = torch.empty_like(middle).scatter_(1, order, middle).view(maps.shape)
    return torch.where(maps.isfinite().all(-1).all(-1)[:, None, None], ranks, torch.nan)


def _center(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the mean of values [B,N], zero where the weight is; also return whether only rounding remains, [B]."""
    centred = (values - (values * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)) * weight
    energy = centred.square().sum(1)
    return centred, energy <= 1e-20 * (values * weight).square().sum(1)


class _CorrelationMetric(Metric):
    """Base of metrics that correlate two maps."""

    bounds = (-1.0, 1.0)
    unscored = CONSTANT


@METRICS.register("consistency")
class Consistency(_CorrelationMetric):
    """Consistency under a small augmentation (figure 2 of the paper as a number).

    Args:
        rotation: in degrees.
        shift_x: to the right, in pixels of 224.
        shift_y: down, in pixels of 224.
    """

    summary = "Correlation of the map with the map of a slightly turned and shifted image, moved back."
    rotation: float = 5.0
    shift_x: float = 20.0
    shift_y: float = 8.0

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        warp = small_warp(case.size, rotation=self.rotation, shift=(self.shift_x, self.shift_y))
        others = case.explain(case.model, warp_images(case.inputs, warp, fill=traits_of(case.model).fill), case.target)
        return Scores(consistency(case.maps, others, warp))


Layers = Literal["cascading", "independent"]


def cascade(model: nn.Module, stages: int = 3, seed: int = 0, layers: Layers = "cascading") -> Iterator[nn.Module]:
    """Yield the model with more and more layers randomised, from the output down to all of them.

    Each parameter is drawn from a normal distribution with the mean and standard deviation that it had, so that the
    activations keep their scale. One module is yielded again and again; it changes from stage to stage. Values are
    drawn on the model's device: on a GPU they differ from those on the CPU, and cost next to nothing.

    Args:
        model: stays as it is.
        stages: steps from the output to the input.
        seed: seed of the random values.
        layers: "independent" randomises the layers of one stage only and restores them afterwards.
    """
    # The copy shares the model's parameters: they are replaced one by one, and never written to.
    randomised = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    modules = [module for module in randomised.modules() if next(module.parameters(recurse=False), None) is not None]
    modules.reverse()  # modules are registered from input to output
    generators: dict[torch.device, torch.Generator] = {}

    @cache  # layers that share a parameter share its substitute
    @torch.no_grad()
    def draw(parameter: nn.Parameter) -> nn.Parameter:
        device = parameter.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
        mean, others = parameter.mean(), parameter.numel() - 1
        spread = torch.linalg.vector_norm(parameter - mean) / others**0.5 if others else mean.abs()
        values = torch.empty_like(parameter).normal_(generator=generator).mul_(spread).add_(mean)
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    start = 0
    for stage in range(1, stages + 1):
        stop = -(-len(modules) * stage // stages)
        replaced = [(module, *own) for module in modules[start:stop] for own in module.named_parameters(recurse=False)]
        for module, name, parameter in replaced:
            setattr(module, name, draw(parameter))
        start = stop
        yield randomised
        if layers == "independent":
            for module, name, parameter in replaced:
                setattr(module, name, parameter)


def similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return Spearman's rank correlation of the positive parts of two batches of maps: [B,H,W] -> [B]."""
    return correlation(mean_ranks(positive(first)), mean_ranks(positive(second)))


@METRICS.register("sanity")
class Sanity(_CorrelationMetric):
    """Randomisation test (Adebayo et al., 2018): a map that survives random weights does not explain the model.

    Args:
        stages: steps in which layers are randomised, from the output down; each costs one map.
        images: number of images of the data set to score; few do, since the test is of the method.
        seed: seed of the random weights.
        layers: "cascading" from the output down to all, or "independent": those of each stage alone.
    """

    summary = "Similarity of the map to those of the model with ever more weights randomised."
    axis = "share of the layers randomised"
    higher_is_better = False
    stages: Count = 3
    images: Count | None = 16
    seed: int = 0
    layers: Layers = "cascading"

    def score(self, case: Case) -> Scores:
        """Return the mean similarity over the stages, [B], with curves over the stages."""
        models = cascade(case.model, self.stages, self.seed, self.layers)
        maps = (case.explain(model, case.inputs, case.target) for model in models)
        curve = torch.stack([similarity(case.maps, other) for other in maps], 1)
        return Scores(curve.mean(1), curve, [stage / self.stages for stage in range(1, self.stages + 1)])


@METRICS.register("random_logit")
class RandomLogit(_CorrelationMetric):
    """Random logit test (Sixt et al., 2020): a map that is the same for any class does not explain the class.

    Args:
        seed: seed of the offset, drawn once, from the explained class to the other one.
        images: number of images of the data set to score; all by default.
    """

    summary = "Similarity of the map to that of another class, drawn at random."
    higher_is_better = False
    seed: int = 0
    images: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._class_counts: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        classes = self._count_classes(case)
        if classes < 2:
            raise OptionError("random_logit needs another class, and the model has one output; leave this metric out")
        offset = int(torch.randint(1, classes, (1,), generator=torch.Generator().manual_seed(self.seed)))
        others = case.explain(case.model, case.inputs, (case.target + offset) % classes)
        return Scores(similarity(case.maps, others))

    def _count_classes(self, case: Case) -> int:
        """Return the number of logits, counted by one pass for each model."""
        if case.model not in self._class_counts:
            with torch.no_grad():
                self._class_counts[case.model] = case.model(case.inputs[:1]).shape[1]
        return self._class_counts[case.model]


def complexity(maps: Tensor) -> Tensor:
    """Return the entropy in nats of the magnitudes of maps as shares of their sum: [B,H,W] -> [B].

    Returns:
        0 for a single pixel, to the logarithm of the number of pixels; NaN for a map that is zero or not finite.
    """
    shares = _magnitudes(maps)
    shares = shares / shares.sum(1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(1)


def sparseness(maps: Tensor) -> Tensor:
    """Return the Gini index of the magnitudes of maps: [B,H,W] -> [B].

    Returns:
        0 for equal magnitudes, to 1 - 1 / pixels for a single one; NaN for a map that is zero or not finite.
    """
    ordered = _magnitudes(maps).sort(1).values  # [B,N]
    count = ordered.shape[1]
    weights = 2 * torch.arange(1, count + 1, device=maps.device, dtype=ordered.dtype) - count - 1
    return (ordered * weights).sum(1) / (count * ordered.sum(1))


def _magnitudes(maps: Tensor) -> Tensor:
    """Return [B,pixels], NaN if a value is not finite."""
    flat = maps.flatten(1).to(precise_dtype(maps.device)).abs()
    return torch.where(flat.isfinite().all(1, keepdim=True), flat, torch.nan)


@METRICS.register("complexity")
class Complexity(Metric):
    """Complexity (Bhatt et al., 2020): entropy of the map's magnitudes, in nats."""

    summary = "Entropy of the map's magnitudes: low if a few pixels have all of it."
    higher_is_better = False
    unscored = "map is zero"

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        return Scores(complexity(case.maps))


@METRICS.register("sparseness")
class Sparseness(Metric):
    """Sparseness (Chalasani et al., 2020): Gini index of the map's magnitudes."""

    summary = "Gini index of the map's magnitudes: high if a few pixels have most of it."
    bounds = (0.0, 1.0)
    unscored = "map is zero"

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        return Scores(sparseness(case.maps))
