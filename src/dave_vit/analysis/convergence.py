"""How many samples are worth it: steps between successive averages, and the distance from a long run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit.analysis.base import analysis, flag
from dave_vit.analysis.inputs import AnalysisOptions, batches, image_count_flag, load_images
from dave_vit.errors import OptionError
from dave_vit.maps import collapse
from dave_vit.methods import DAVE
from dave_vit.reduce import Accumulator, Mean, Reducer, Shrinkage, SoftThreshold, TrimmedMean
from dave_vit.viz import DAVE as VIOLET
from dave_vit.viz import Drawing
from dave_vit.viz.plots import Band, Floats, add_legend, compute_quartiles, create_plots, draw_band
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section

ESTIMATORS: dict[str, Reducer] = {
    "mean": Mean(),
    "shrinkage": Shrinkage(),
    "soft threshold, 1 e": SoftThreshold(1.0),
    "soft threshold, 2 e": SoftThreshold(2.0),
    "trimmed mean": TrimmedMean(),
}
_BATCH = 8  # pictures at a time; every one of their samples is a forward pass of its own


@dataclass(frozen=True)
class _Tap:
    """A reducer that averages, and shows every sample to somebody on its way."""

    watch: Callable[[Tensor], None]

    def accumulator(self) -> Accumulator:
        return cast(Accumulator, _Tapped(self.watch))


class _Tapped:
    def __init__(self, watch: Callable[[Tensor], None]) -> None:
        self._inner, self._watch = Mean().accumulator(), watch

    def update(self, samples: Tensor, weights: Tensor | None = None) -> None:
        self._inner.update(samples, weights)
        self._watch(samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True)
class Convergence:
    """What was measured for one model.

    Attributes:
        steps: summed L1 distance between the averages of t and t + 1 samples, [images, T - 1].
        at: numbers of samples at which estimators were compared with the long run.
        errors: by estimator, squared error of the map relative to the long run's, [images, len(at)].
    """

    steps: Floats
    at: tuple[int, ...]
    errors: Mapping[str, Floats]

    def band(self) -> Band:
        """Median and quartiles of the steps; the first is that from 1 to 2 samples."""
        return compute_quartiles(np.arange(2, self.steps.shape[1] + 2), self.steps)


def convergence(
    model: nn.Module,
    inputs: Tensor,
    target: Tensor,
    *,
    samples: int = 128,
    reference: int = 512,
    seed: int = 0,
    preset: str = "paper",
) -> Convergence:
    """Follows DAVE's average sample by sample.

    Args:
        model: maps inputs to logits.
        inputs: [B,C,H,W].
        target: [B].
        samples: T.
        reference: samples of the long run, whose draws are independent.
        seed: of the draws; the long run has the next one.
        preset: whose neighbourhood is drawn from.
    """
    if samples < 2:
        raise OptionError(f"{samples} samples; convergence needs 2 or more")
    truth = collapse(DAVE(model, reference, seed + 1, preset, reducer=Mean()).attribute(inputs, target)).double()
    follower = _Follower(truth, checkpoints(samples))
    # Rows of a pass as many as pictures: so every pass brings one sample of each.
    dave = DAVE(model, samples, seed, preset, reducer=_Tap(follower.see), chunk=len(inputs))
    before: Tensor | None = None
    steps = []
    for explanation in dave.refine(inputs, target):
        if before is not None:
            steps.append((explanation.attribution - before).abs().double().flatten(1).sum(1))
        before = explanation.attribution
    moved = torch.stack(steps, 1).cpu().numpy()
    return Convergence(moved, follower.at, {name: np.stack(errors, 1) for name, errors in follower.errors.items()})


def checkpoints(samples: int) -> tuple[int, ...]:
    """Powers of two from 2 on, and the last number itself."""
    powers = {2**k for k in range(1, samples.bit_length()) if 2**k <= samples}
    return tuple(sorted(powers | {samples}))


class _Follower:
    """Takes samples as they come, and compares all estimators with the long run at some of them."""

    def __init__(self, truth: Tensor, at: Sequence[int]) -> None:
        self.truth, self.at = truth, tuple(at)
        self.errors: dict[str, list[Floats]] = {name: [] for name in ESTIMATORS}
        self._running = {name: reducer.accumulator() for name, reducer in ESTIMATORS.items()}

    def see(self, samples: Tensor) -> None:
        for name, running in self._running.items():
            running.update(samples)
            if running.count in self.at:
                missed = collapse(running.attribution()).double() - self.truth
                energy = self.truth.square().flatten(1).sum(1)
                self.errors[name].append((missed.square().flatten(1).sum(1) / energy).cpu().numpy())


@dataclass(frozen=True)
class ConvergenceOptions(AnalysisOptions):
    """Options of the analysis.

    Attributes:
        samples: T.
        reference: samples of the long run.
        preset: whose neighbourhood is drawn from.
    """

    n: int = image_count_flag(4)
    samples: int = flag(128, "Followed one by one.", least=2, metavar="T")
    reference: int = flag(256, "Samples of the long run.", least=1)
    preset: str = flag("paper", "Neighbourhood: paper, default or official.")


@analysis("convergence")
def analyze_convergence(options: ConvergenceOptions) -> Section:
    """How many samples are worth it: steps of the average, and the error of every estimator against a long run."""
    how: dict[str, Any] = {name: getattr(options, name) for name in ("samples", "reference", "seed", "preset")}
    curves: dict[str, Convergence] = {}
    images = 0
    for label, model in options.load():
        shown = load_images(model, options)
        images = len(shown)
        curves[label] = _joined([convergence(model, *batch, **how) for batch in batches(shown, _BATCH)])
    long_run = {"long run": f"{options.reference} samples"}
    facts = options.facts(images=images, samples=options.samples, preset=options.preset, **long_run)
    text = (
        "Left: summed L1 distance between the average of t - 1 and of t samples, per image. Right: squared error of "
        "the map against an independent long run, relative to the long run's energy, for every estimator; the long "
        "run is itself an average and adds its own error to all of them."
    )
    drawing = ReportFigure("convergence", _figure(curves), "Median over images; bands are quartiles.")
    return Section("convergence", "Convergence", text, facts, [_table(curves)], _rows(curves), [drawing])


def _joined(parts: Sequence[Convergence]) -> Convergence:
    errors = {name: np.concatenate([part.errors[name] for part in parts]) for name in parts[0].errors}
    return Convergence(np.concatenate([part.steps for part in parts]), parts[0].at, errors)


def _figure(curves: Mapping[str, Convergence]) -> Drawing:
    figure, (left, *rest) = create_plots(1 + len(curves), width=5.4, per_row=2)
    for number, (label, one) in enumerate(curves.items()):
        draw_band(left, one.band(), label, number)
    left.set(yscale="log", xscale="log", xlabel="samples t", ylabel="L1 distance of successive averages")
    left.set_title("step of the average", fontsize=10)
    _count_ticks(left, next(iter(curves.values())).at)
    add_legend(left)
    for axes, (label, one) in zip(rest, curves.items(), strict=True):
        for number, (name, errors) in enumerate(one.errors.items()):
            draw_band(axes, compute_quartiles(one.at, errors), name, number, colour=VIOLET if name == "mean" else None)
        axes.set(yscale="log", xscale="log", xlabel="samples T", ylabel="relative squared error of the map")
        axes.set_title(f"distance from the long run, {label}", fontsize=10)
        _count_ticks(axes, one.at)
        add_legend(axes)
    return figure


def _count_ticks(axes: Any, counts: Sequence[int]) -> None:
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xticks([], minor=True)


def _table(curves: Mapping[str, Convergence]) -> ReportTable:
    at = next(iter(curves.values())).at
    rows = [
        (label, name, *(f"{value:.3g}" for value in np.median(errors, axis=0)))
        for label, one in curves.items()
        for name, errors in one.errors.items()
    ]
    head = ("model", "estimator", *(f"T = {count}" for count in at))
    return ReportTable(head, tuple(rows), "Median relative squared error against the long run.")


def _rows(curves: Mapping[str, Convergence]) -> list[dict[str, Number]]:
    rows: list[dict[str, Number]] = []
    for label, one in curves.items():
        bands = {"step of the average": one.band()}
        bands |= {f"error: {name}": compute_quartiles(one.at, errors) for name, errors in one.errors.items()}
        for what, band in bands.items():
            rows += [{"model": label, "what": what, "samples": int(at), **numbers} for at, numbers in band.points()]
    return rows
