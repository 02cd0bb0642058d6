"""Sanity checks: whether a map depends on the model's weights and on the explained class."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit._internal.schema import check_choice
from dave_vit.errors import OptionError
from dave_vit.maps import positive
from dave_vit.metrics.base import CONSTANT, METRICS, Case, Metric, Scores, check_at_least
from dave_vit.metrics.consistency import correlation, mean_ranks

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
    substitutes = _RandomParameters(seed)
    start = 0
    for stage in range(1, stages + 1):
        stop = -(-len(modules) * stage // stages)
        replaced = [(module, *own) for module in modules[start:stop] for own in module.named_parameters(recurse=False)]
        for module, name, parameter in replaced:
            setattr(module, name, substitutes.substitute(parameter))
        start = stop
        yield randomised
        if layers == "independent":
            for module, name, parameter in replaced:
                setattr(module, name, parameter)


class _RandomParameters:
    """Random substitutes of parameters; layers that share a parameter share its substitute."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._substitutes: dict[nn.Parameter, nn.Parameter] = {}

    @torch.no_grad()
    def substitute(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return normal values with the mean and the standard deviation of a parameter."""
        if parameter not in self._substitutes:
            device = parameter.device
            generator = self._generators.setdefault(device, torch.Generator(device).manual_seed(self.seed))
            mean, others = parameter.mean(), parameter.numel() - 1
            spread = torch.linalg.vector_norm(parameter - mean) / others**0.5 if others else mean.abs()
            values = torch.empty_like(parameter).normal_(generator=generator).mul_(spread).add_(mean)
            self._substitutes[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return self._substitutes[parameter]


def similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return Spearman's rank correlation of the positive parts of two batches of maps: [B,H,W] -> [B]."""
    return correlation(mean_ranks(positive(first)), mean_ranks(positive(second)))


@METRICS.register("sanity")
class Sanity(Metric):
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
    bounds = (-1.0, 1.0)
    unscored = CONSTANT

    def __init__(self, stages: int = 3, images: int = 16, seed: int = 0, layers: Layers = "cascading") -> None:
        check_at_least(1, stages=stages, images=images)
        check_choice("layers", layers, get_args(Layers))
        self.stages, self.images, self.seed = stages, images, seed
        self.layers: Layers = layers

    def score(self, case: Case) -> Scores:
        """Return the mean similarity over the stages, [B], with curves over the stages."""
        models = cascade(case.model, self.stages, self.seed, self.layers)
        maps = (case.explain(model, case.inputs, case.target) for model in models)
        curve = torch.stack([similarity(case.maps, other) for other in maps], 1)
        return Scores(curve.mean(1), curve, [stage / self.stages for stage in range(1, self.stages + 1)])


@METRICS.register("random_logit")
class RandomLogit(Metric):
    """Random logit test (Sixt et al., 2020): a map that is the same for any class does not explain the class.

    Args:
        seed: seed of the offset, drawn once, from the explained class to the other one.
        images: number of images of the data set to score; all by default.
    """

    summary = "Similarity of the map to that of another class, drawn at random."
    higher_is_better = False
    bounds = (-1.0, 1.0)
    unscored = CONSTANT

    def __init__(self, seed: int = 0, images: int | None = None) -> None:
        check_at_least(1, images=images)
        self.seed, self.images = seed, images
        self._class_counts: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        if case.model not in self._class_counts:
            with torch.no_grad():
                self._class_counts[case.model] = case.model(case.inputs[:1]).shape[1]
        classes = self._class_counts[case.model]
        if classes < 2:
            raise OptionError("random_logit needs another class, and the model has one output; leave this metric out")
        offset = int(torch.randint(1, classes, (1,), generator=torch.Generator().manual_seed(self.seed)))
        others = case.explain(case.model, case.inputs, (case.target + offset) % classes)
        return Scores(similarity(case.maps, others))
