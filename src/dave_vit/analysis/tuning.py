"""Choice of a neighbourhood for a model: one that is measurably better than the default, or the default itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit._internal.atomic_files import write_bytes
from dave_vit.data.grids import GridOptions, choose_grids, compose_grids, select_candidates
from dave_vit.engine.forward import compute_logits
from dave_vit.errors import InputError
from dave_vit.methods import DAVE
from dave_vit.methods.pass_size import PassSize, clean_logits
from dave_vit.methods.presets import LEVELS, neighborhood_levels
from dave_vit.methods.sampling import CleanPrediction
from dave_vit.metrics import Perturbation, area, deletion, gridpg, insertion
from dave_vit.models.adapter import ImageLike
from dave_vit.neighborhood import Neighborhood

CANDIDATES = ((20.0, 0.1, 0.3), (10.0, 0.1, 0.15), *LEVELS)
"""From wide to narrow: rotation in degrees, shift in sides, t of variance-preserving noise."""
DEFAULT = CANDIDATES.index(LEVELS[0])
"""Index of the default, which draws from a narrower neighbourhood where this one is too wide for an image."""

MIN_SURVIVAL = 0.85  # relative to the narrowest neighbourhood
MIN_GAIN = 2.5  # standard errors by which a neighbourhood must be better: 5 % for the best of four
_MIN_IMAGES = 6  # fewer do not show a difference
_VIEWS = 8  # of each image in each neighbourhood
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
        scores: mean of both scores of each image.
        localization: share of each map's evidence in its own cell of a grid of four images, for the predicted class;
            empty if the images are of fewer than four classes.
    """

    rotation: float
    translation: float
    noise_level: float
    survival: float
    deletion: float
    insertion: float
    scores: tuple[float, ...]
    localization: tuple[float, ...]

    @property
    def switches(self) -> dict[str, float]:
        """The neighbourhood as options of DAVE."""
        return {"rotation": self.rotation, "translation": self.translation, "noise_level": self.noise_level}

    def gain(self, default: "MeasuredNeighborhood") -> tuple[float, float]:
        """Return by how much the scores of the same images exceed the default's, and the standard error of that."""
        return _mean_difference(self.scores, default.scores)


@dataclass(frozen=True)
class Tuning:
    """Result of `tune`.

    Attributes:
        neighborhoods: all candidates, from wide to narrow; that of index `DEFAULT` is the default.
        chosen: index of the one to use.
    """

    neighborhoods: tuple[MeasuredNeighborhood, ...]
    chosen: int

    @property
    def switches(self) -> dict[str, float]:
        """The chosen neighbourhood: ``DAVE(model, **tuning.switches)``; empty if it is the default."""
        return {} if self.chosen == DEFAULT else self.neighborhoods[self.chosen].switches

    @property
    def criterion(self) -> str:
        """What a neighbourhood must reach to be chosen instead of the default, in a sentence."""
        least = MIN_SURVIVAL * self.neighborhoods[-1].survival
        return (
            f"a neighbourhood replaces the default if survival is at least {least:.2f} ({MIN_SURVIVAL} of the "
            f"narrowest's) and the mean of deletion and insertion exceeds the default's by more than {MIN_GAIN:g} "
            "standard errors on the same images, and GridPG of these predictions is not below the default's"
        )

    @property
    def warning(self) -> str:
        """Why the default stays, or "" if another neighbourhood was chosen."""
        if self.chosen != DEFAULT:
            return ""
        if len(self.neighborhoods[0].scores) < _MIN_IMAGES:
            return f"{len(self.neighborhoods[0].scores)} images show no difference; give at least {_MIN_IMAGES}"
        return "no neighbourhood is measurably better than the default on these images; the preset is the default"

    def text(self) -> str:
        """Return the content of a preset file."""
        lines = [f"# {self.criterion}"]
        for index, one in enumerate(self.neighborhoods):
            settings = f"rotation {one.rotation:g}, shift {one.translation:g}, noise {one.noise_level:.3g}"
            scores = f"survival {one.survival:.2f}, deletion {one.deletion:.3f}, insertion {one.insertion:.3f}"
            name = " (default)" if index == DEFAULT else ""
            lines.append(f"# {'*' if index == self.chosen else ' '} {settings}{name}: {scores}")
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

    A neighbourhood is chosen instead of the default only if the model keeps its predictions on its views and its maps
    are measurably better in deletion and insertion of these predictions; `Tuning.criterion` says how much better.

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
    for index in range(len(CANDIDATES)):
        if index not in neighborhoods:
            neighborhoods[index] = _measure(model, inputs, logits, index, seed)
            if report is not None:
                report(index, neighborhoods[index])
    measured = tuple(neighborhoods[index] for index in range(len(CANDIDATES)))
    return Tuning(measured, choose(measured))


def choose(neighborhoods: Sequence[MeasuredNeighborhood]) -> int:
    """Return the index of the neighbourhood that gains most over the default, or `DEFAULT` if none surely gains."""
    default, least = neighborhoods[DEFAULT], MIN_SURVIVAL * neighborhoods[-1].survival
    gains = {
        index: gain
        for index, one in enumerate(neighborhoods)
        if one.survival >= least
        and (gain := one.gain(default))[0] > MIN_GAIN * gain[1]
        and (shift := _mean_difference(one.localization, default.localization))[0] >= -shift[1]
    }
    if len(default.scores) < _MIN_IMAGES or not gains:
        return DEFAULT
    return max(gains, key=lambda index: gains[index][0])


def _preprocess(model: nn.Module, images: Sequence[ImageLike]) -> Tensor:
    prepare: Any = getattr(model, "preprocess", None)
    if prepare is None:
        raise InputError("the model has no preprocess; give preprocessed images [N, C, H, W]")
    return torch.cat([prepare(image) for image in images]) if images else torch.empty(0)


def _measure(model: nn.Module, inputs: Tensor, logits: Tensor, index: int, seed: int) -> MeasuredNeighborhood:
    (neighborhood,) = neighborhood_levels(model, CANDIDATES[index])
    survival = _survival(model, inputs, CleanPrediction.of(model, logits), neighborhood, seed)
    dave = DAVE(model, seed=seed) if index == DEFAULT else DAVE(model, seed=seed, neighborhood=neighborhood)
    target = logits.argmax(1)
    maps = dave.explain(inputs, target).map
    removed = area(deletion(model, inputs, maps, target, Perturbation(_STEPS)), _STEPS)
    restored = area(insertion(model, inputs, maps, target, Perturbation(_STEPS, "most", "blur")), _STEPS)
    scores = tuple(((removed + restored) / 2).tolist())
    settings = (*CANDIDATES[index][:2], neighborhood.noise.level)
    localization = _localization(dave, inputs, logits)
    means = (float(removed.mean()), float(restored.mean()))
    return MeasuredNeighborhood(*settings, survival, *means, scores, localization)


def _localization(dave: DAVE, inputs: Tensor, logits: Tensor) -> tuple[float, ...]:
    """Return GridPG of the predicted classes, which deletion and insertion do not measure and needs no labels."""
    pool = select_candidates(logits, logits.argmax(1).tolist(), confidence=0.0)
    grids = choose_grids(pool, GridOptions(grids=max(1, len(inputs) // 4)))
    if not grids:
        return ()
    images = compose_grids(torch.stack([inputs[list(grid.images)] for grid in grids]))
    target = torch.tensor([grid.labels for grid in grids], device=inputs.device)
    return tuple(gridpg(dave.explain(images, target).map).nan_to_num().flatten().double().tolist())


def _mean_difference(own: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences and its standard error."""
    differences = [one - two for one, two in zip(own, other, strict=True)]
    if len(differences) < 2:
        return 0.0, float("inf")
    return fmean(differences), stdev(differences) / len(differences) ** 0.5


def _survival(model: nn.Module, inputs: Tensor, clean: CleanPrediction, neighborhood: Neighborhood, seed: int) -> float:
    """Return the mean survival over views and images; needs forward passes only."""
    shape = tuple(inputs.shape[1:])
    views = neighborhood.views(shape, samples=_VIEWS, seed=seed, device=inputs.device, dtype=inputs.dtype)
    shares = []
    for index, image in enumerate(inputs.split(1)):
        logits = compute_logits(model, views.apply(image)[:, 0])  # [n, classes]
        shares.append(clean.select(torch.tensor([index], device=inputs.device)).survival(logits.unsqueeze(1)).mean())
    return float(torch.stack(shares).mean())
