"""A run from plan to report: scan the images, compute rows, sum up, draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dave_vit.atomic import json_bytes
from dave_vit.bench.engines.local import LocalEngine
from dave_vit.bench.examples import Example, choose_examples, example_images, example_metric
from dave_vit.bench.gridding import kept_grids
from dave_vit.bench.numbers.collect import Collected, collect
from dave_vit.bench.numbers.rows import Seen, read_seen
from dave_vit.bench.numbers.summary import summarise
from dave_vit.bench.page import html
from dave_vit.bench.plan import ModelEntry, Plan
from dave_vit.bench.report import Report, markdown
from dave_vit.bench.store import RunFolder
from dave_vit.bench.tasks import Task, Tasks
from dave_vit.bench.worker import Job, Loader
from dave_vit.data import open_dataset
from dave_vit.errors import DataError
from dave_vit.metrics.localization import GridPG

Watch = Callable[[str, int, int, int], None]
"""Is told what is being done, how many maps are done, how many there are, and how many were done before."""


class Engine(Protocol):
    """Computes tasks somewhere and sees to it that their files are in the run's folder."""

    def __enter__(self) -> object: ...

    def __exit__(self, *failure: object) -> None: ...

    def run(self, job: Job, folder: RunFolder, tasks: Sequence[Task], finished: Callable[[Task], None]) -> None:
        """Returns when the files of all tasks are there."""


def evaluate(
    plan: Plan,
    out: str | Path,
    *,
    engine: Engine | None = None,
    loader: Loader = ModelEntry.load,
    threads: int | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Runs a plan, or what is left of it, and writes summary and report.

    Args:
        plan: what is computed.
        out: the run's folder; the same one resumes, another plan in it is refused.
        engine: where; this process on the CPU by default.
        loader: from an entry of the plan to a model; for models that no spec names.
        threads: of torch in each worker on the CPU.
        watch: is told of progress.

    Returns:
        The content of ``summary.json``.
    """
    run = _Run(plan, RunFolder(out), Job(plan, loader, threads), engine or LocalEngine(), watch or _silent)
    with run.engine:
        return run.complete()


@dataclass
class _Subjects:
    """What the scan found for one model."""

    seen: list[Seen]
    chosen: list[Seen]
    left_out: dict[str, str]
    tasks: list[Task]
    notes: list[str]


class _Run:
    """The phases of a run."""

    def __init__(self, plan: Plan, folder: RunFolder, job: Job, engine: Engine, watch: Watch) -> None:
        self.plan, self.folder, self.job, self.engine, self.watch = plan, folder, job, engine, watch
        data = open_dataset(plan.data, plan.limit)
        document = plan.document(data.digest())
        folder.prepare(document)
        self.count = len(data)
        self.tasks = Tasks(plan, document)

    def complete(self) -> dict[str, Any]:
        """All phases; each finds what is done and does the rest."""
        scans = self.tasks.scans(self.count)
        self._compute("looking at images", scans)
        models = [self._subjects(i, [t for t in scans if t.model == i]) for i in range(len(self.plan.models))]
        self._compute("evaluating", [task for model in models for task in model.tasks])
        collected = [self._collected(model) for model in models]
        skipped = {one.name: one for model in models for one in model.seen if one.predicted is None}
        summary = summarise(
            self.plan, self.count, collected, [model.left_out for model in models], list(skipped.values())
        )
        summary["notes"] = [note for model in models for note in model.notes]
        examples = self._examples(models, collected)
        report = Report(self.plan, summary, collected, examples, self.folder)
        self.folder.write(
            {
                "report.md": markdown(report).encode(),
                "report.html": html(report).encode(),
                "summary.json": json_bytes(summary),  # last: it says that the run is complete
            }
        )
        return summary

    def _compute(self, what: str, tasks: list[Task]) -> None:
        total = sum(len(task.images) for task in tasks)
        before = sum(len(task.images) for task in tasks if (self.folder / task.file).exists())
        done = 0

        def finished(task: Task) -> None:
            nonlocal done
            done += len(task.images)
            self.watch(what, done, total, before)

        if before < total:
            self.watch(what, before, total, before)
            self.engine.run(self.job, self.folder, tasks, finished)

    def _subjects(self, model: int, scans: list[Task]) -> _Subjects:
        seen = list(read_seen(self.folder / task.file for task in scans))
        left_out = {one.name: reason for one in seen if (reason := self._reason(one))}
        chosen = [one for one in seen if one.name not in left_out]
        if not chosen:
            label, reasons = self.plan.models[model].label, sorted(set(left_out.values()))
            raise DataError(f"{self.plan.data}: no image can be scored with {label}: {reasons[0]}")
        metrics = [entry.create() for entry in self.plan.metrics]
        tasks = self.tasks.images(model, chosen) if any(not metric.grids for metric in metrics) else []
        notes = []
        for metric in metrics:
            if isinstance(metric, GridPG):
                label = self.plan.models[model].label
                found = kept_grids(self.folder, label, seen, metric)
                tasks += self.tasks.grids(model, found.grids)
                notes += [f"{label}: {found.note}"] if found.note else []
        return _Subjects(seen, chosen, left_out, tasks, notes)

    def _reason(self, seen: Seen) -> str | None:
        """Why no method is tried on an image."""
        if seen.dropped:
            return "cannot be read" if seen.predicted is None else seen.dropped
        least = self.plan.min_confidence
        if least is None:
            return None
        sure = seen.predicted == seen.label and seen.confidence is not None and seen.confidence > least
        return None if sure else f"not classified correctly with more than {least:g}"

    def _collected(self, model: _Subjects) -> Collected:
        paths = [self.folder / task.file for task in model.tasks]
        return collect(paths, [entry.label for entry in self.plan.methods])

    def _examples(self, models: list[_Subjects], collected: list[Collected]) -> list[list[tuple[Task, list[Example]]]]:
        """For each model and method, the examples and the task that made their maps."""
        metric = example_metric(self.plan)
        if metric is None:
            return [[] for _ in models]
        made = []
        for number, (model, found) in enumerate(zip(models, collected, strict=True)):
            chosen = choose_examples(self.plan, found, {one.name: one for one in model.chosen}, metric)
            kept = [(method, examples) for method, examples in enumerate(chosen) if examples]
            made.append([(self.tasks.examples(number, i, example_images(some)), some) for i, some in kept])
        self._compute("drawing examples", [task for model in made for task, _ in model])
        return made


def _silent(what: str, done: int, total: int, before: int) -> None:
    """Nobody watches."""
