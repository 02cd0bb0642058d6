"""A run from plan to report: scan the images, compute rows, summarise, write the report."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from dave_vit._internal.atomic_files import json_bytes
from dave_vit._internal.content_hash import pack_hashes, read_hashes
from dave_vit.data import open_dataset
from dave_vit.errors import DataError
from dave_vit.evaluate.engines import Engine
from dave_vit.evaluate.engines.local import LocalEngine
from dave_vit.evaluate.job import EvalJob, ModelLoader, check_models, software_versions
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import ModelEntry
from dave_vit.evaluate.report import Example, build_model_report, check_examples, render_report, select_examples
from dave_vit.evaluate.scoring import ImageEvidence, read_evidence
from dave_vit.evaluate.statistics.rows import ScannedImage, read_scanned_images
from dave_vit.evaluate.statistics.scores import read_scores
from dave_vit.evaluate.statistics.summary import ModelRun, describe_budget_overruns, summarise
from dave_vit.evaluate.store import DamagedFile, RunFolder, describe_version_changes
from dave_vit.evaluate.tasks import EvalTask, TaskBuilder, load_or_build_grids
from dave_vit.metrics import GridMetric

T = TypeVar("T")
ProgressCallback = Callable[[str, int, int, int], None]
"""Called with the phase, the number of maps done, their total, and how many were done before this command."""


def evaluate(
    plan: Plan,
    out: str | Path,
    *,
    engine: Engine | None = None,
    loader: ModelLoader = ModelEntry.load,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    allow_mixed: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Run a plan, or what is left of it, and write summary and report.

    Args:
        plan: what is computed.
        out: folder of the run; the same folder resumes, another plan in it is an error.
        engine: where tasks are computed; this process on the CPU by default.
        loader: returns the model of an entry of the plan; for models that no spec names.
        threads: torch threads of each worker on the CPU.
        progress: called as the run advances, see `ProgressCallback`.
        allow_mixed: continue with other code, libraries or weights than the run was started with; the report says so.
        command: command line, for the report.

    Returns:
        The content of ``summary.json``.
    """
    run = EvaluationRun(EvalJob(plan, loader, threads), out, engine, progress, allow_mixed=allow_mixed)
    with run.engine:
        return run.complete(command)


class EvaluationRun:
    """The phases of a run: each finds what is done and computes the rest, while ``engine`` is entered.

    Args:
        job: plan, loader and threads.
        out: folder of the run.
        engine: see `evaluate`.
        progress: see `evaluate`.
        allow_mixed: see `evaluate`.
    """

    def __init__(
        self,
        job: EvalJob,
        out: str | Path,
        engine: Engine | None = None,
        progress: ProgressCallback | None = None,
        *,
        allow_mixed: bool = False,
    ) -> None:
        self.plan, self.engine, self.progress = job.plan, engine or LocalEngine(), progress or (lambda *state: None)
        self.folder, self.data = RunFolder(out), open_dataset(self.plan.data, self.plan.limit)
        folder = self.folder
        read_hashes(folder / "hashes.json")
        document = self.plan.document(self.data.digest())
        weights = {} if (folder / "plan.json").exists() and not allow_mixed else check_models(job, self.data)
        folder.write_plan(document)
        folder.write({"hashes.json": pack_hashes()})
        software = software_versions()
        self.provenance = folder.record_provenance(software, weights, allow_mixed=allow_mixed)
        own = next(one for one in reversed(self.provenance) if one["software"] == software)
        self.job = job if allow_mixed else replace(job, provenance=own)
        self.tasks = TaskBuilder(self.plan, document)
        self.damage: list[str] = []

    def complete(self, command: str | None = None) -> dict[str, Any]:
        """Run all phases and return the content of ``summary.json``."""
        plan, scans = self.plan, self._scan(range(len(self.plan.models)))
        tasks = [task for scan in scans for task in scan.tasks]
        paths, methods = [self.folder / task.file for task in tasks], [entry.label for entry in plan.methods]
        by_label = self._compute_and_read("evaluating", tasks, lambda: read_scores(paths, methods))
        models = [replace(scan, scores=by_label.get(scan.label, scan.scores)) for scan in scans]
        summary = summarise(plan, len(self.data), models)
        summary |= {"command": command, "weights": self.provenance[-1]["models"]}
        changes = ("; ".join(describe_version_changes(before, now)) for before, now in pairwise(self.provenance))
        notes = [f"computed with mixed versions: {change}" for change in changes]
        notes += [note for model in models for note in model.notes]
        summary["notes"] = notes + describe_budget_overruns(plan, summary["results"])
        reports = self._build_reports(summary, models)
        summary["notes"] += self.damage  # damaged files may turn up until here
        files = render_report(plan, summary, reports)
        self.folder.write({**files, "summary.json": json_bytes(summary)})  # last: it says that the run is complete
        return summary

    def scan_images(self) -> list[ScannedImage]:
        """Return the images that the first model can classify, with its predictions."""
        (scan,) = self._scan([0])
        return [one for one in scan.images if one.name not in scan.left_out]

    def _scan(self, models: Iterable[int]) -> list[ModelRun]:
        tasks = self.tasks.scans(len(self.data))
        return self._compute_and_read("scanning images", tasks, lambda: [self._read_scan(one, tasks) for one in models])

    def collect_evidence(self, phase: str, groups: Sequence[Sequence[tuple[int, int]]]) -> ImageEvidence:
        """Return the evidence of the first method for pairs of image and class; each image once in a group."""
        tasks = [task for pairs in groups for task in self.tasks.evidence(0, pairs)]
        return self._compute_and_read(phase, tasks, lambda: read_evidence([self.folder / task.file for task in tasks]))

    def _compute_and_read(self, phase: str, tasks: list[EvalTask], read: Callable[[], T]) -> T:
        """Compute tasks and return what is read from their files; a damaged file is set aside and computed again."""
        retried: set[Path] = set()
        while True:
            self._compute(phase, tasks)
            try:
                return read()
            except DamagedFile as error:
                if error.path in retried:
                    raise
                retried.add(error.path)
                aside = self.folder.set_aside(error.path)
                self.damage.append(f"{error}; it is now {aside.name} and was computed again")

    def _compute(self, phase: str, tasks: list[EvalTask]) -> None:
        total = sum(len(task.images) for task in tasks)
        existing = self.folder.find_existing(task.file for task in tasks)
        before = sum(len(task.images) for task in tasks if task.file in existing)
        done = 0

        def advance(task: EvalTask) -> None:
            nonlocal done
            done += len(task.images)
            self.progress(phase, done, total, before)

        if before < total:
            self.progress(phase, before, total, before)
            self.engine.run(self.job, self.folder, tasks, advance)

    def _read_scan(self, model: int, tasks: list[EvalTask]) -> ModelRun:
        label = self.plan.models[model].label
        images = list(read_scanned_images(self.folder / task.file for task in tasks if task.model == model))
        left_out = {one.name: reason for one in images if (reason := self._reason_to_leave_out(one))}
        usable = [one for one in images if one.name not in left_out]
        if not usable:
            raise DataError(f"{self.plan.data}: no image can be scored with {label}: {min(left_out.values())}")
        metrics = [entry.create() for entry in self.plan.metrics]
        grid_metrics = [metric for metric in metrics if isinstance(metric, GridMetric)]
        row_tasks = self.tasks.images(model, usable) if len(grid_metrics) < len(metrics) else []
        note = ""
        if grid_metrics:  # all of them use the same grids
            grids, note = load_or_build_grids(self.folder, label, images, grid_metrics[0])
            row_tasks += self.tasks.grids(model, grids)
        return ModelRun(label, images, left_out, row_tasks, [f"{label}: {note}"] if note else [])

    def _reason_to_leave_out(self, image: ScannedImage) -> str | None:
        if image.dropped:
            return "cannot be read" if image.predicted is None else image.dropped
        least = self.plan.min_confidence
        if least is None or (image.predicted == image.label and (image.confidence or 0.0) > least):
            return None
        return f"not classified correctly with more than {least:g}"

    def _build_reports(self, summary: dict[str, Any], models: list[ModelRun]) -> list[dict[str, Any]]:
        """Return the report of each model, after computing the maps of its examples."""
        examples = [list(self._plan_examples(number, model)) for number, model in enumerate(models)]
        tasks = list(dict.fromkeys(task for own in examples for task, _ in own))
        every = [example for own in examples for _, example in own]
        self._compute_and_read("drawing examples", tasks, lambda: check_examples(every))
        return [
            build_model_report(self.plan, summary, model.label, model.scores, [example for _, example in own])
            for model, own in zip(models, examples, strict=True)
        ]

    def _plan_examples(self, number: int, model: ModelRun) -> Iterator[tuple[EvalTask, Example]]:
        """Yield the examples of each method, each with the task that computes its map."""
        images = {one.name: one for one in model.images}
        for method, places in enumerate(select_examples(self.plan, model.scores)):
            chosen = {images[name].index: images[name] for name, _ in places.values()}
            task = self.tasks.examples(number, method, list(chosen.values()))
            for place, (name, value) in places.items():
                label = self.plan.methods[method].label
                yield task, Example(label, place, images[name], value, self.folder / task.file)
