"""Choice of a neighbourhood for a model: the widest one on whose views the model keeps its prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit._internal.atomic_files import write_bytes
from dave_vit.engine.forward import compute_logits
from dave_vit.errors import InputError
from dave_vit.methods import DAVE
from dave_vit.methods.clean_prediction import CleanPrediction
from dave_vit.methods.pass_size import PassSize, clean_logits
from dave_vit.methods.presets import LEVELS, neighborhood_levels
from dave_vit.metrics import Perturbation, area, deletion, insertion
from dave_vit.models.adapter import ImageLike
from dave_vit.neighborhood import Neighborhood

CANDIDATES = ((20.0, 0.1, 0.3), (10.0, 0.1, 0.15), *LEVELS)
"""From wide to narrow: rotation in degrees, shift in sides, t of variance-preserving noise."""

_MIN_SURVIVAL = 0.85  # relative to the narrowest neighbourhood
_VIEWS = 8  # of each image in each neighbourhood
_SCORED = 8  # images that are also scored by deletion and insertion
_STEPS = tuple(step / 10 for step in range(11))
_ROWS = 16  # rows of a pass


@dataclass(frozen=True)
class MeasuredNeighborhood:
    """A neighbourhood and its measurements.

    Attributes:
        rotation: in degrees.
        translation: in sides.
        noise_level: in the unit of the model's noise.
        survival: mean share of the predicted class's probability that survives on the views.
        deletion: deletion score of the model's own predictions, higher is better.
        insertion: insertion score, likewise.
    """

    rotation: float
    translation: float
    noise_level: float
    survival: float
    deletion: float
    insertion: float

    @property
    def switches(self) -> dict[str, float]:
        """The neighbourhood as options of DAVE."""
        return {"rotation": self.rotation, "translation": self.translation, "noise_level": self.noise_level}


@dataclass(frozen=True)
class Tuning:
    """Result of `tune`.

    Attributes:
        neighborhoods: all candidates, from wide to narrow.
        chosen: index of the one that fits the model.
    """

    neighborhoods: tuple[MeasuredNeighborhood, ...]
    chosen: int

    @property
    def switches(self) -> dict[str, float]:
        """The chosen neighbourhood: ``DAVE(model, **tuning.switches)``."""
        return self.neighborhoods[self.chosen].switches

    def text(self) -> str:
        """Return the content of a preset file."""
        lines = []
        for index, one in enumerate(self.neighborhoods):
            settings = f"rotation {one.rotation:g}, shift {one.translation:g}, noise {one.noise_level:.3g}"
            scores = f"survival {one.survival:.2f}, deletion {one.deletion:.3f}, insertion {one.insertion:.3f}"
            lines.append(f"# {'*' if index == self.chosen else ' '} {settings}: {scores}")
        values = [f"{name} = {value}" for name, value in self.switches.items()]
        return "\n".join(['base = "default"', "", *lines, "[neighborhood]", *values, ""])

    def save(self, path: str | Path) -> None:
        """Write a file that every ``preset`` accepts."""
        write_bytes(Path(path), self.text().encode())


def tune(
    model: nn.Module,
    images: Tensor | Sequence[ImageLike],
    *,
    seed: int = 0,
    known: Mapping[int, MeasuredNeighborhood] | None = None,
    report: Callable[[int, MeasuredNeighborhood], None] | None = None,
) -> Tuning:
    """Choose the neighbourhood that fits a model, without labels.

    Chooses the widest neighbourhood on whose views at least 0.85 of the predicted class's probability survives,
    relative to the narrowest one. Deletion and insertion of the model's own predictions are measured as well.

    Args:
        model: from ``load_model``, or any module that maps inputs to logits.
        images: a few typical images: preprocessed ``[N, C, H, W]``, or PIL images and paths.
        seed: seed of the views.
        known: neighbourhoods that were measured before, by their index.
        report: called with the index and the measurements of each neighbourhood as soon as it is measured.

    Example:
        >>> tuning = dave_vit.tune(model, ["a.jpg", "b.jpg", "c.jpg"])
        >>> tuning.save("mine.toml")
        >>> dave_vit.DAVE(model, preset="mine.toml")
    """
    inputs = images if isinstance(images, Tensor) else _preprocess(model, images)
    if inputs.ndim != 4 or not len(inputs):
        raise InputError(f"images of shape {tuple(inputs.shape)}; give at least one, [N, C, H, W]")
    logits = clean_logits(model, inputs, PassSize(_ROWS))
    neighborhoods = dict(known or {})
    for index, values in enumerate(CANDIDATES):
        if index not in neighborhoods:
            neighborhoods[index] = _measure(model, inputs, logits, values, seed)
            if report is not None:
                report(index, neighborhoods[index])
    measured = tuple(neighborhoods[index] for index in range(len(CANDIDATES)))
    return Tuning(measured, choose_widest([one.survival for one in measured]))


def choose_widest(survival: Sequence[float]) -> int:
    """Return the first index, from wide to narrow, at which nearly as much survives as at the last."""
    return next(index for index, share in enumerate(survival) if share >= _MIN_SURVIVAL * survival[-1])


def _preprocess(model: nn.Module, images: Sequence[ImageLike]) -> Tensor:
    prepare: Any = getattr(model, "preprocess", None)
    if prepare is None:
        raise InputError("the model has no preprocess; give preprocessed images [N, C, H, W]")
    return torch.cat([prepare(image) for image in images]) if images else torch.empty(0)


def _measure(
    model: nn.Module, inputs: Tensor, logits: Tensor, values: tuple[float, float, float], seed: int
) -> MeasuredNeighborhood:
    (neighborhood,) = neighborhood_levels(model, values)
    survival = _survival(model, inputs, CleanPrediction.of(model, logits), neighborhood, seed)
    images, target = inputs[:_SCORED], logits[:_SCORED].argmax(1)
    maps = DAVE(model, _VIEWS, seed, neighborhood=neighborhood).explain(images, target).map
    removed = deletion(model, images, maps, target, Perturbation(_STEPS))
    restored = insertion(model, images, maps, target, Perturbation(_STEPS, "most", "blur"))
    scores = (float(area(curve, _STEPS).mean()) for curve in (removed, restored))
    return MeasuredNeighborhood(*values[:2], neighborhood.noise.level, survival, *scores)


def _survival(model: nn.Module, inputs: Tensor, clean: CleanPrediction, neighborhood: Neighborhood, seed: int) -> float:
    """Return the mean survival over views and images; needs forward passes only."""
    shape = tuple(inputs.shape[1:])
    views = neighborhood.views(shape, samples=_VIEWS, seed=seed, device=inputs.device, dtype=inputs.dtype)
    shares = []
    for index, image in enumerate(inputs.split(1)):
        logits = compute_logits(model, views.apply(image)[:, 0])  # [n, classes]
        own = clean.select(torch.tensor([index], device=inputs.device))
        shares.append(own.survival(logits.unsqueeze(1)).mean())
    return float(torch.stack(shares).mean())
