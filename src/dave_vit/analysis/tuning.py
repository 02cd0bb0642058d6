"""The neighbourhood chosen for a model: the widest one on whose views the model still sees what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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

LADDER = ((20.0, 0.1, 0.3), (10.0, 0.1, 0.15), *LEVELS)
"""From wide to narrow: rotation in degrees, shift in sides, t of variance-preserving noise."""

KEEPS = 0.85  # of the probability that survives in the narrowest neighbourhood
_VIEWS = 8  # of each image, of each rung
_SCORED = 8  # images that are also scored by deletion and insertion
_STEPS = tuple(step / 10 for step in range(11))
_ROWS = 16  # of a pass


@dataclass(frozen=True)
class Rung:
    """A neighbourhood, and what was measured in it.

    Attributes:
        rotation: in degrees.
        translation: in sides.
        noise_level: as the model's noise has it.
        survival: share of the predicted class's probability that is left on the views, on average.
        deletion: of the model's own predictions, higher is better.
        insertion: likewise.
    """

    rotation: float
    translation: float
    noise_level: float
    survival: float
    deletion: float
    insertion: float

    @property
    def switches(self) -> dict[str, float]:
        """As DAVE takes it."""
        return {"rotation": self.rotation, "translation": self.translation, "noise_level": self.noise_level}


@dataclass(frozen=True)
class Tuning:
    """What `tune` found.

    Attributes:
        rungs: from wide to narrow.
        chosen: the number of the one that fits the model.
    """

    rungs: tuple[Rung, ...]
    chosen: int

    @property
    def switches(self) -> dict[str, float]:
        """The chosen neighbourhood: ``DAVE(model, **tuning.switches)``."""
        return self.rungs[self.chosen].switches

    def text(self) -> str:
        """A preset file."""
        lines = [f"# {'* ' if at == self.chosen else '  '}{_line(rung)}" for at, rung in enumerate(self.rungs)]
        values = [f"{name} = {value}" for name, value in self.switches.items()]
        return "\n".join(['base = "default"', "", *lines, "[neighborhood]", *values, ""])

    def save(self, path: str | Path) -> None:
        """Writes a file that every ``preset`` takes."""
        write_bytes(Path(path), self.text().encode())


def tune(
    model: nn.Module,
    images: Tensor | Sequence[ImageLike],
    *,
    seed: int = 0,
    known: Mapping[int, Rung] | None = None,
    report: Callable[[int, Rung], None] | None = None,
) -> Tuning:
    """Chooses the neighbourhood that fits a model, without labels.

    The widest rung is taken on whose views at least 0.85 of the predicted class's probability survives, measured by
    what survives in the narrowest one. Deletion and insertion of the model's own predictions are measured beside it.

    Args:
        model: of ``load_model``, or any module that maps inputs to logits.
        images: a handful such as the model will see: preprocessed ``[N, C, H, W]``, or pictures and paths of them.
        seed: of the views.
        known: rungs that were measured before, by their numbers.
        report: called with the number and the numbers of each rung as soon as it is measured.

    Example:
        >>> tuning = dave_vit.tune(model, ["a.jpg", "b.jpg", "c.jpg"])
        >>> tuning.save("mine.toml")
        >>> dave_vit.DAVE(model, preset="mine.toml")
    """
    inputs = images if isinstance(images, Tensor) else _preprocessed(model, images)
    if inputs.ndim != 4 or not len(inputs):
        raise InputError(f"images of shape {tuple(inputs.shape)}; give at least one, [N, C, H, W]")
    logits = clean_logits(model, inputs, PassSize(_ROWS))
    rungs = []
    for number, values in enumerate(LADDER):
        rung = (known or {}).get(number)
        if rung is None:
            rung = _measured(model, inputs, logits, values, seed)
            if report is not None:
                report(number, rung)
        rungs.append(rung)
    return Tuning(tuple(rungs), widest([rung.survival for rung in rungs]))


def widest(survival: Sequence[float]) -> int:
    """The first of the rungs, from wide to narrow, on which nearly as much survives as on the last."""
    return next(number for number, share in enumerate(survival) if share >= KEEPS * survival[-1])


def table(rungs: Iterable[Rung]) -> list[dict[str, Any]]:
    """The numbers of rungs, ready for JSON."""
    return [asdict(rung) for rung in rungs]


def _preprocessed(model: nn.Module, images: Sequence[ImageLike]) -> Tensor:
    prepare: Any = getattr(model, "preprocess", None)
    if prepare is None:
        raise InputError("the model has no preprocess; give preprocessed images [N, C, H, W]")
    return torch.cat([prepare(image) for image in images]) if images else torch.empty(0)


def _measured(model: nn.Module, inputs: Tensor, logits: Tensor, values: tuple[float, float, float], seed: int) -> Rung:
    (around,) = neighborhood_levels(model, values)
    rotation, translation, _ = values
    kept = _survival(model, inputs, CleanPrediction.of(model, logits), DAVE(model, _VIEWS, seed, neighborhood=around))
    scored, target = inputs[:_SCORED], logits[:_SCORED].argmax(1)
    maps = DAVE(model, _VIEWS, seed, neighborhood=around).explain(scored, target).map
    cut = area(deletion(model, scored, maps, target, Perturbation(fractions=_STEPS)), _STEPS)
    filled = Perturbation(fractions=_STEPS, order="most", baseline="blur")
    added = area(insertion(model, scored, maps, target, filled), _STEPS)
    return Rung(rotation, translation, around.noise.level, kept, float(cut.mean()), float(added.mean()))


def _survival(model: nn.Module, inputs: Tensor, clean: CleanPrediction, dave: DAVE) -> float:
    """The mean over views and images; forward passes only."""
    shape = tuple(inputs.shape[1:])
    views = dave.neighborhood.views(shape, samples=_VIEWS, seed=dave.seed, device=inputs.device, dtype=inputs.dtype)
    shares = []
    for number, image in enumerate(inputs.split(1)):
        seen = compute_logits(model, views.apply(image)[:, 0])  # [n, classes]
        one = clean.select(torch.tensor([number], device=inputs.device))
        shares.append(one.survival(seen.unsqueeze(1)).mean())
    return float(torch.stack(shares).mean())


def _line(rung: Rung) -> str:
    words = f"rotation {rung.rotation:g}, shift {rung.translation:g}, noise {rung.noise_level:.3g}"
    return f"{words}: survival {rung.survival:.2f}, deletion {rung.deletion:.3f}, insertion {rung.insertion:.3f}"
