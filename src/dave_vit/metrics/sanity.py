"""Whether a map depends on what the model has learnt: similarity after its weights are drawn anew, layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.errors import OptionError
from dave_vit.maps import positive
from dave_vit.metrics.base import METRICS, Case, Metric, Scores
from dave_vit.metrics.consistency import correlation

Layers = Literal["cascading", "independent"]


def cascade(model: nn.Module, stages: int = 3, seed: int = 0, layers: Layers = "cascading") -> Iterator[nn.Module]:
    """Copies of the model with ever more layers randomised, from the output down; in the last one all are.

    Each parameter is drawn from a normal distribution with the mean and the spread that it had, so that the numbers
    in the network keep their scale. What is yielded is one module that changes from stage to stage. Draws are made
    where the model is: on a GPU they are others than on the CPU, and cost next to nothing.

    Args:
        model: stays as it is.
        stages: steps from the output to the input.
        seed: of the draws.
        layers: "independent" randomises the layers of one stage only and leaves all others as they are.
    """
    # The copy shares the model's parameters: they are replaced one by one, and never written to.
    shuffled = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    modules = [module for module in shuffled.modules() if next(module.parameters(recurse=False), None) is not None]
    modules.reverse()  # modules are registered from input to output
    draws = _Draws(seed)
    done = 0
    for stage in range(1, stages + 1):
        stop = -(-len(modules) * stage // stages)
        drawn = [(module, *own) for module in modules[done:stop] for own in module.named_parameters(recurse=False)]
        for module, name, parameter in drawn:
            setattr(module, name, draws.instead_of(parameter))
        done = stop
        yield shuffled
        if layers == "independent":
            for module, name, parameter in drawn:
                setattr(module, name, parameter)


class _Draws:
    """Random parameters in the place of given ones; layers that share one go on sharing it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    @torch.no_grad()
    def instead_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Normal values with the mean and the spread of a parameter."""
        if parameter not in self._made:
            device = parameter.device
            generator = self._generators.setdefault(device, torch.Generator(device).manual_seed(self.seed))
            mean, others = parameter.mean(), parameter.numel() - 1
            spread = torch.linalg.vector_norm(parameter - mean) / others**0.5 if others else mean.abs()
            values = torch.empty_like(parameter).normal_(generator=generator).mul_(spread).add_(mean)
            self._made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return self._made[parameter]


def similarity(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's rank correlation of the positive parts of two batches of maps: [B,H,W] -> [B]."""
    everywhere = torch.ones_like(first[:1], dtype=torch.bool)
    return correlation(mean_ranks(positive(first)), mean_ranks(positive(second)), everywhere)


def mean_ranks(maps: Tensor) -> Tensor:
    """Places of the pixels in the order of their values, equal ones at their mean place; NaN in a map with any."""
    ordered, order = maps.flatten(1).sort(1)
    place = torch.arange(ordered.shape[1], device=maps.device).expand_as(ordered)
    rises = ordered[:, 1:] != ordered[:, :-1]
    edge = rises.new_ones(len(ordered), 1)
    first = torch.where(torch.cat([edge, rises], 1), place, 0).cummax(1).values  # where the run of equal values begins
    last = torch.where(torch.cat([rises, edge], 1), place, ordered.shape[1]).flip(1).cummin(1).values.flip(1)
    middle = (first + last).to(precise_dtype(maps.device)) / 2
    ranks = torch.empty_like(middle).scatter_(1, order, middle).view(maps.shape)
    return torch.where(maps.isfinite().all(-1).all(-1)[:, None, None], ranks, torch.nan)


@METRICS.register("sanity")
class Sanity(Metric):
    """Randomisation test (Adebayo et al., 2018): a map that survives random weights does not explain the model.

    Args:
        stages: steps in which layers are randomised, from the output down; each costs a map.
        images: how many images of the data set are used: it tests the method, not the images.
        seed: of the random weights.
        layers: "cascading" from the output down to all, or "independent": those of each stage by themselves.
    """

    summary = "Similarity of the map to those of the model with ever more weights randomised."
    axis = "share of the layers randomised"
    higher_is_better = False

    def __init__(self, stages: int = 3, images: int = 16, seed: int = 0, layers: Layers = "cascading") -> None:
        if stages < 1 or images < 1:
            raise OptionError(f"{stages} stages on {images} images; expected 1 or more of each")
        if layers not in get_args(Layers):
            raise OptionError(f"layers {layers!r}; expected one of {', '.join(get_args(Layers))}")
        self.stages, self.images, self.seed = stages, images, seed
        self.layers: Layers = layers

    def score(self, case: Case) -> Scores:
        """[B] with curves: the mean similarity over the stages."""
        own, everywhere = mean_ranks(positive(case.maps)), torch.ones_like(case.maps[:1], dtype=torch.bool)
        steps = []
        for model in cascade(case.model, self.stages, self.seed, self.layers):
            maps = case.explain(model, case.inputs, case.target)
            steps.append(correlation(own, mean_ranks(positive(maps)), everywhere))
        curve = torch.stack(steps, 1)
        return Scores(curve.mean(1), curve, [stage / self.stages for stage in range(1, self.stages + 1)])

    def reason(self, case: Case, index: int) -> str:
        """Why a map has no score."""
        return "map is constant" if case.maps[index].isfinite().all() else "map is not finite"


@METRICS.register("random_logit")
class RandomLogit(Metric):
    """Random logit test (Sixt et al., 2020): a map that is the same for any class does not explain the class.

    Args:
        seed: of the other class: the explained one plus a number that is drawn once.
        images: how many images of the data set are used; all by default.
    """

    summary = "Similarity of the map to that of another class, drawn at random."
    higher_is_better = False

    def __init__(self, seed: int = 0, images: int | None = None) -> None:
        if images is not None and images < 1:
            raise OptionError(f"{images} images; expected 1 or more")
        self.seed, self.images = seed, images
        self._classes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def score(self, case: Case) -> Scores:
        """[B]."""
        if case.model not in self._classes:
            with torch.no_grad():
                self._classes[case.model] = case.model(case.inputs[:1]).shape[1]
        classes = self._classes[case.model]
        if classes < 2:
            raise OptionError("random_logit needs another class, and the model has one output; leave this metric out")
        ahead = int(torch.randint(1, classes, (1,), generator=torch.Generator().manual_seed(self.seed)))
        others = case.explain(case.model, case.inputs, (case.target + ahead) % classes)
        return Scores(similarity(case.maps, others))

    def reason(self, case: Case, index: int) -> str:
        """Why a map has no score."""
        return "map is constant" if case.maps[index].isfinite().all() else "map is not finite"
