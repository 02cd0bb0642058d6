"""How many samples are needed: steps between successive averages, and the distance from a long run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit.analysis.inputs import AnalysisOptions, analysis, count_flag, flag
from dave_vit.errors import OptionError
from dave_vit.maps import collapse
from dave_vit.methods import DAVE
from dave_vit.reduce import Accumulator, Mean, Reducer, Shrinkage, SoftThreshold, TrimmedMean
from dave_vit.viz.colors import DAVE as VIOLET
from dave_vit.viz.figures import Drawing
from dave_vit.viz.plots import Band, Floats, add_legend, compute_quartiles, create_plots, draw_band
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section

ESTIMATORS: dict[str, Reducer] = {
    "mean": Mean(),
    "shrinkage": Shrinkage(),
    "soft threshold, 1 e": SoftThreshold(1.0),
    "soft threshold, 2 e": SoftThreshold(2.0),
    "trimmed mean": TrimmedMean(),
}
_BATCH = 8  # images at a time; every one of their samples is a forward pass of its own


class _ErrorTracker:
    """Reducer that averages, and compares all estimators with the long run after some numbers of samples."""

    def __init__(self, reference: Tensor, at: Sequence[int]) -> None:
        self._mean, self.reference, self.at = Mean().accumulator(), reference, tuple(at)
        self.errors: dict[str, list[Floats]] = {name: [] for name in ESTIMATORS}
        self._running = {name: reducer.accumulator() for name, reducer in ESTIMATORS.items()}

    def accumulator(self) -> Accumulator:
        return cast(Accumulator, self)

    def update(self, samples: Tensor, weights: Tensor | None = None) -> None:
        """Update the average and all estimators with samples, and record their errors."""
        self._mean.update(samples, weights)
        for name, running in self._running.items():
            running.update(samples)
            if running.count in self.at:
                difference = collapse(running.attribution()).double() - self.reference
                energy = self.reference.square().flatten(1).sum(1)
                self.errors[name].append((difference.square().flatten(1).sum(1) / energy).cpu().numpy())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mean, name)


@dataclass(frozen=True)
class Convergence:
    """Measurements of one model.

    Attributes:
        steps: summed L1 distance between the averages of t and t + 1 samples, [images, T - 1].
        at: numbers of samples after which estimators are compared with the long run.
        errors: squared error of the map relative to the long run's energy by estimator, [images, len(at)].
    """

    steps: Floats
    at: tuple[int, ...]
    errors: Mapping[str, Floats]

    def band(self) -> Band:
        """Return median and quartiles of the steps; the first is that from 1 to 2 samples."""
        return compute_quartiles(np.arange(2, self.steps.shape[1] + 2), self.steps)

    def error_bands(self) -> dict[str, Band]:
        """Return the median and quartiles of the errors of each estimator."""
        return {name: compute_quartiles(self.at, errors) for name, errors in self.errors.items()}


@dataclass(frozen=True)
class ConvergenceOptions(AnalysisOptions):
    """Options of the analysis.

    Attributes:
        samples: T.
        reference: samples of the long run, whose draws are independent: its seed is the next one.
        preset: preset of the neighbourhood.
    """

    n: int = count_flag(4)
    samples: int = flag(128, "Samples to follow one by one.", least=2, metavar="T")
    reference: int = flag(256, "Samples of the long run.", least=1)
    preset: str = flag("paper", "Neighbourhood: paper, default or official.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 2:
            raise OptionError(f"{self.samples} samples; convergence needs 2 or more")


def convergence(model: nn.Module, inputs: Tensor, target: Tensor, options: ConvergenceOptions) -> Convergence:
    """Follow DAVE's average for inputs [B,C,H,W] and targets [B] sample by sample."""
    samples, seed, preset = options.samples, options.seed, options.preset
    reference = DAVE(model, options.reference, seed + 1, preset, reducer=Mean()).attribute(inputs, target)
    tracker = _ErrorTracker(collapse(reference).double(), checkpoints(samples))
    # As many rows per pass as images: then every pass adds one sample of each.
    dave = DAVE(model, samples, seed, preset, reducer=tracker, chunk=len(inputs))
    averages = (explanation.attribution for explanation in dave.refine(inputs, target))
    steps = [(after - before).abs().double().flatten(1).sum(1) for before, after in pairwise(averages)]
    errors = {name: np.stack(columns, 1) for name, columns in tracker.errors.items()}
    return Convergence(torch.stack(steps, 1).cpu().numpy(), tracker.at, errors)


def checkpoints(samples: int) -> tuple[int, ...]:
    """Return the powers of two from 2 up to a number, and the number itself."""
    return tuple(sorted({2**k for k in range(1, samples.bit_length())} | {samples}))


@analysis("convergence")
def analyze_convergence(options: ConvergenceOptions) -> Section:
    """Measure how many samples are needed: steps of the average, and errors of all estimators against a long run."""
    curves: dict[str, Convergence] = {}
    for label, model, images in options.load_with_images():
        curves[label] = _join([convergence(model, *batch, options) for batch in images.batches(_BATCH)])
    long_run = {"long run": f"{options.reference} samples"}
    facts = options.facts(images=len(images), samples=options.samples, preset=options.preset, **long_run)
    text = (
        "Left: summed L1 distance between the average of t - 1 and of t samples, per image. Right: squared error of "
        "the map against an independent long run, relative to the long run's energy, for every estimator; the long "
        "run is itself an average and adds its own error to all of them."
    )
    figure = ReportFigure("convergence", _draw(curves), "Median over images; bands are quartiles.")
    rows: list[dict[str, Number]] = [
        {"model": label, "what": quantity, "samples": int(at), **numbers}
        for label, curve in curves.items()
        for quantity, band in _bands(curve).items()
        for at, numbers in band.points()
    ]
    return Section("convergence", "Convergence", text, facts, [_table(curves)], rows, [figure])


def _join(parts: Sequence[Convergence]) -> Convergence:
    errors = {name: np.concatenate([part.errors[name] for part in parts]) for name in parts[0].errors}
    return Convergence(np.concatenate([part.steps for part in parts]), parts[0].at, errors)


def _bands(curve: Convergence) -> dict[str, Band]:
    errors = {f"error: {name}": band for name, band in curve.error_bands().items()}
    return {"step of the average": curve.band(), **errors}


def _draw(curves: Mapping[str, Convergence]) -> Drawing:
    figure, (left, *rest) = create_plots(1 + len(curves), width=5.4, per_row=2)
    for index, (label, curve) in enumerate(curves.items()):
        draw_band(left, curve.band(), label, index)
    left.set(xlabel="samples t", ylabel="L1 distance of successive averages")
    left.set_title("step of the average", fontsize=10)
    for axes, (label, curve) in zip(rest, curves.items(), strict=True):
        for index, (name, band) in enumerate(curve.error_bands().items()):
            draw_band(axes, band, name, index, colour=VIOLET if name == "mean" else None)
        axes.set(xlabel="samples T", ylabel="relative squared error of the map")
        axes.set_title(f"distance from the long run, {label}", fontsize=10)
    counts = next(iter(curves.values())).at
    for axes in (left, *rest):
        axes.set(yscale="log", xscale="log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xticks([], minor=True)
        add_legend(axes)
    return figure


def _table(curves: Mapping[str, Convergence]) -> ReportTable:
    rows = [
        (label, name, *(f"{value:.3g}" for value in np.median(errors, axis=0)))
        for label, curve in curves.items()
        for name, errors in curve.errors.items()
    ]
    head = ("model", "estimator", *(f"T = {count}" for count in next(iter(curves.values())).at))
    return ReportTable(head, tuple(rows), "Median relative squared error against the long run.")
