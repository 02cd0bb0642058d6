"""A run from plan to report: scan the images, compute rows, sum up, draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from dave_vit._internal.atomic_files import json_bytes
from dave_vit.data import open_dataset
from dave_vit.errors import DataError
from dave_vit.evaluate.engines import Engine
from dave_vit.evaluate.engines.local import LocalEngine
from dave_vit.evaluate.job import EvalJob, Loader, check
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import ModelEntry
from dave_vit.evaluate.provenance import provenance
from dave_vit.evaluate.report import Example, ModelReport, check_examples, example_columns, example_metric, pages, view
from dave_vit.evaluate.statistics.collect import ModelScores, read_scores
from dave_vit.evaluate.statistics.rows import ScannedImage, read_scanned_images
from dave_vit.evaluate.statistics.summary import over_budget, summarise
from dave_vit.evaluate.store import DamagedFile, RunFolder, differences
from dave_vit.evaluate.tasks import EvalTask, TaskBuilder, load_or_build_grids
from dave_vit.metrics import GridMetric

T = TypeVar("T")
ProgressCallback = Callable[[str, int, int, int], None]
"""Is told what is being done, how many maps are done, how many there are, and how many were done before."""


def evaluate(
    plan: Plan,
    out: str | Path,
    *,
    engine: Engine | None = None,
    loader: Loader = ModelEntry.load,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    allow_mixed: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Runs a plan, or what is left of it, and writes summary and report.

    Args:
        plan: what is computed.
        out: the run's folder; the same one resumes, another plan in it is refused.
        engine: where; this process on the CPU by default.
        loader: from an entry of the plan to a model; for models that no spec names.
        threads: of torch in each worker on the CPU.
        progress: called as the run advances, see `ProgressCallback`.
        allow_mixed: go on with other code, libraries or weights than the run was begun with; the report says so.
        command: the line that asked for it, for the report.

    Returns:
        The content of ``summary.json``.
    """
    folder, job = RunFolder(out), EvalJob(plan, loader, threads)
    run = _Run(folder, job, engine or LocalEngine(), progress or _silent, allow_mixed=allow_mixed, command=command)
    with run.engine:
        return run.complete()


@dataclass
class _Scan:
    """What the scan tells of one model.

    Attributes:
        label: of the model.
        images: all.
        left_out: images that no method is tried on, with the reason.
        tasks: what there is to compute.
        notes: what a reader should know.
    """

    label: str
    images: list[ScannedImage]
    left_out: dict[str, str]
    tasks: list[EvalTask]
    notes: list[str]


class _Run:
    """The phases of a run."""

    def __init__(
        self,
        folder: RunFolder,
        job: EvalJob,
        engine: Engine,
        watch: ProgressCallback,
        *,
        allow_mixed: bool,
        command: str | None,
    ) -> None:
        self.plan, self.folder, self.engine, self.watch = job.plan, folder, engine, watch
        self.command = command
        plan = self.plan
        data = open_dataset(plan.data, plan.limit)
        document = plan.document(data.digest())
        weights = {} if folder.holds_plan and not allow_mixed else check(job, data)
        folder.prepare(document)
        now = provenance(weights)
        self.made_with = folder.enter(now, allow_mixed=allow_mixed)
        own = next(one for one in reversed(self.made_with) if one["software"] == now["software"])
        self.job = job if allow_mixed else replace(job, made_with=own)
        self.count = len(data)
        self.tasks = TaskBuilder(plan, document)
        self.damage: list[str] = []

    def complete(self) -> dict[str, Any]:
        """All phases; each finds what is done and does the rest."""
        tasks = self.tasks.scans(self.count)
        models = range(len(self.plan.models))
        scans = self._computed(
            "looking at images", tasks, lambda: [self._scan(i, [t for t in tasks if t.model == i]) for i in models]
        )
        parts = [task for scan in scans for task in scan.tasks]
        methods = [entry.label for entry in self.plan.methods]
        rows = self._computed(
            "evaluating", parts, lambda: read_scores((self.folder / one.file for one in parts), methods)
        )
        collected = [rows.get(scan.label, ModelScores()) for scan in scans]
        skipped = {one.name: one for scan in scans for one in scan.images if one.predicted is None}
        summary = summarise(self.plan, self.count, collected, [scan.left_out for scan in scans], list(skipped.values()))
        summary |= {"command": self.command, "weights": self.made_with[-1]["models"]}
        summary["notes"] = [*_mixed(self.made_with), *(note for scan in scans for note in scan.notes)]
        summary["notes"] += over_budget(self.plan, summary["results"])
        views = self._views(summary, scans, collected)
        summary["notes"] += self.damage  # which may show until here
        report = pages(self.plan, summary, views)
        self.folder.write({**report, "summary.json": json_bytes(summary)})  # last: it says that the run is complete
        return summary

    def _computed(self, what: str, tasks: list[EvalTask], read: Callable[[], T]) -> T:
        """What is read out of the files of tasks; one that turns out to be damaged is set aside and computed again."""
        tried: set[Path] = set()
        while True:
            self._compute(what, tasks)
            try:
                return read()
            except DamagedFile as error:
                if error.path in tried:
                    raise
                tried.add(error.path)
                aside = self.folder.set_aside(error.path)
                self.damage.append(f"{error}; it is now {aside.name} and was made again")

    def _compute(self, what: str, tasks: list[EvalTask]) -> None:
        total = sum(len(task.images) for task in tasks)
        there = self.folder.present(task.file for task in tasks)
        before = sum(len(task.images) for task in tasks if task.file in there)
        done = 0

        def finished(task: EvalTask) -> None:
            nonlocal done
            done += len(task.images)
            self.watch(what, done, total, before)

        if before < total:
            self.watch(what, before, total, before)
            self.engine.run(self.job, self.folder, tasks, finished)

    def _scan(self, model: int, tasks: list[EvalTask]) -> _Scan:
        label = self.plan.models[model].label
        images = list(read_scanned_images(self.folder / task.file for task in tasks))
        left_out = {one.name: reason for one in images if (reason := self._reason(one))}
        chosen = [one for one in images if one.name not in left_out]
        if not chosen:
            raise DataError(f"{self.plan.data}: no image can be scored with {label}: {min(left_out.values())}")
        scan = _Scan(label, images, left_out, [], [])
        metrics = [entry.create() for entry in self.plan.metrics]
        grids = [metric for metric in metrics if isinstance(metric, GridMetric)]
        if len(grids) < len(metrics):
            scan.tasks += self.tasks.images(model, chosen)
        if grids:  # all of them take the same ones
            kept = load_or_build_grids(self.folder, label, images, grids[0])
            scan.tasks += self.tasks.grids(model, kept.grids)
            scan.notes += [f"{label}: {kept.note}"] if kept.note else []
        return scan

    def _reason(self, image: ScannedImage) -> str | None:
        """Why no method is tried on an image."""
        if image.dropped:
            return "cannot be read" if image.predicted is None else image.dropped
        least = self.plan.min_confidence
        if least is None:
            return None
        sure = image.predicted == image.label and image.confidence is not None and image.confidence > least
        return None if sure else f"not classified correctly with more than {least:g}"

    def _views(self, summary: dict[str, Any], scans: list[_Scan], collected: list[ModelScores]) -> list[ModelReport]:
        """What the report shows of each model; the maps of its examples are computed first."""
        examples: list[dict[str, list[Example]]] = []
        tasks: list[EvalTask] = []
        for number, (scan, rows) in enumerate(zip(scans, collected, strict=True)):
            examples.append({})
            for method, task, chosen in self._examples(number, scan, rows):
                examples[-1][method] = chosen
                tasks.append(task)
        made = [example for own in examples for chosen in own.values() for example in chosen]
        self._computed("drawing examples", tasks, lambda: check_examples(made))
        parts = zip(scans, collected, examples, strict=True)
        return [view(self.plan, summary, scan.label, rows, own) for scan, rows, own in parts]

    def _examples(self, model: int, scan: _Scan, rows: ModelScores) -> Iterator[tuple[str, EvalTask, list[Example]]]:
        """For each method that has a score, its examples and the task that makes their maps."""
        metric = example_metric(self.plan)
        images = {one.name: one for one in scan.images}
        for method, picks in enumerate(example_columns(rows, metric) if metric else ()):
            if picks:
                chosen = {images[name].index: images[name] for name, _ in picks.values()}
                task = self.tasks.examples(model, method, list(chosen.values()))
                path = self.folder / task.file
                made = [Example(place, images[name], value, path) for place, (name, value) in picks.items()]
                yield self.plan.methods[method].label, task, made


def _mixed(made_with: list[dict[str, Any]]) -> list[str]:
    """That a run was computed with several versions, where it was."""
    return [
        f"computed with mixed versions: {'; '.join(change.partition('.')[2] for change in differences(before, after))}"
        for before, after in pairwise(made_with)
    ]


def _silent(what: str, done: int, total: int, before: int) -> None:
    """Nobody watches."""
