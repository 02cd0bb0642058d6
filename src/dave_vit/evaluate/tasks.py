"""Tasks: parts of a run that are computed as a whole, each named by a hash of its content and kept as one file.

The grids of each model are built here too, once per run, from the predictions of the scan.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dave_vit._internal.atomic_files import json_bytes
from dave_vit._internal.content_hash import hash_content
from dave_vit.data.grids import Grid, GridCandidate, GridOptions, choose_grids
from dave_vit.errors import first_line
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.evaluate.store import DamagedFile, RunFolder
from dave_vit.metrics import GridMetric

Kind = Literal["scan", "images", "grids", "examples", "evidence"]
_Indices = tuple[int, ...]
_CONFIDENCES = (0.9, 0.8, 0.5, 0.0)  # tried in turn if the usual confidence leaves too few images
_IMAGES_PER_CELL = 25  # there are at most as many grids as images


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A part of a run that one worker computes.

    Attributes:
        kind: "scan" (predictions), "images" and "grids" (rows), "examples" (maps for the report),
            "evidence" (for audits).
        name: name of its file without folder and ending; contains the hash.
        model: index in the plan.
        method: index in the plan; -1 for a scan.
        seed: seed of the method.
        start: index of its first image or grid among those of the run.
        images: indices in the data set, one or several for each target.
        targets: the explained class of each image; for a grid, those of its cells.
        is_last_attempt: it is not retried, so images that do not fit into memory are dropped.
    """

    kind: Kind
    name: str
    model: int
    method: int
    seed: int
    start: int
    images: _Indices
    targets: _Indices = ()
    is_last_attempt: bool = False

    @property
    def file(self) -> str:
        """The file that exists once the task is done, relative to the run."""
        folder = "rows" if self.kind in ("images", "grids") else self.kind
        return f"{folder}/{self.name}.{'npz' if self.kind in ('examples', 'evidence') else 'parquet'}"

    @property
    def chunk(self) -> tuple[int, str, int]:
        """Key that is shared by tasks on the same images."""
        return self.model, self.kind, self.start


class TaskBuilder:
    """Builds the tasks of a plan.

    Args:
        plan: the plan.
        document: its content as the run stores it.
    """

    def __init__(self, plan: Plan, document: dict[str, Any]) -> None:
        self.plan = plan
        self._shared = {name: document[name] for name in ("data", "smoothing", "batch", "save_maps")}
        self._models, self._methods, self._metrics = (document[name] for name in ("models", "methods", "metrics"))

    def scans(self, count: int) -> list[EvalTask]:
        """Return the tasks that compute the predictions of each model for ``count`` images."""
        shard = self.plan.shard
        return [
            self._task("scan", model, -1, 0, start, tuple(range(start, min(start + shard, count))))
            for model in range(len(self.plan.models))
            for start in range(0, count, shard)
        ]

    def images(self, model: int, images: Sequence[ScannedImage]) -> list[EvalTask]:
        """Return the tasks for rows of image metrics; all methods of a shard in turn, so that it is read once."""
        each = [((one.index,), (self._target(one),)) for one in images]
        return list(self._shards("images", model, each, self.plan.shard))

    def evidence(self, model: int, pairs: Sequence[tuple[int, int]]) -> list[EvalTask]:
        """Return the tasks that compute the evidence of images for classes; no image may occur twice."""
        each = [((index,), (target,)) for index, target in pairs]
        return list(self._shards("evidence", model, each, self.plan.shard))

    def grids(self, model: int, grids: Sequence[Grid]) -> list[EvalTask]:
        """Return the tasks for rows of grid metrics."""
        step = max(1, self.plan.shard // len(grids[0].images)) if grids else 1
        return list(self._shards("grids", model, [(grid.images, grid.labels) for grid in grids], step))

    def examples(self, model: int, method: int, images: Sequence[ScannedImage]) -> EvalTask:
        """Return the task that computes maps of some images for the report."""
        indices = tuple(one.index for one in images)
        targets = tuple(self._target(one) for one in images)
        seed = self.plan.methods[method].select_seeds(self.plan.seeds)[0]
        return self._task("examples", model, method, seed, 0, indices, targets)

    def _target(self, image: ScannedImage) -> int:
        """Return the class to explain; -1 if there is none."""
        target = image.label if self.plan.target == "label" and image.label is not None else image.predicted
        return -1 if target is None else target

    def _shards(
        self, kind: Kind, model: int, items: Sequence[tuple[Sequence[int], Sequence[int]]], step: int
    ) -> Iterator[EvalTask]:
        """Yield a task for each shard of items (image indices and targets), method and seed."""
        for start in range(0, len(items), step):
            part = items[start : start + step]
            images = tuple(index for indices, _ in part for index in indices)
            targets = tuple(target for _, targets in part for target in targets)
            for method, entry in enumerate(self.plan.methods):
                for seed in entry.select_seeds(self.plan.seeds):
                    yield self._task(kind, model, method, seed, start, images, targets)

    def _task(
        self, kind: Kind, model: int, method: int, seed: int, start: int, images: _Indices, targets: _Indices = ()
    ) -> EvalTask:
        entry = self._methods[method] if method >= 0 else None
        content = [self._shared, self._models[model], entry, self._metrics, kind, seed, start, images, targets]
        label = (entry or self._models[model])["label"]
        name = f"{_file_name(label)}-{kind}-{start:06d}-{hash_content(content)[:16]}"
        return EvalTask(kind, name, model, method, seed, start, images, targets)


def _file_name(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", label)


def relax_confidence(images: Sequence[ScannedImage], options: GridOptions) -> GridOptions:
    """Return the options with a confidence that leaves enough images, for models that are hardly ever sure.

    Models trained with smoothed labels seldom exceed 0.95. Enough are 25 images per cell, which make 100 grids of 2x2,
    of as many classes as cells; fewer if the metric wants fewer grids or fewer images are recognised at all. The
    highest confidence that has them is taken.
    """
    usable = [one for one in (options.confidence, *_CONFIDENCES) if one <= options.confidence]
    steps = [replace(options, confidence=confidence) for confidence in usable]
    cells, recognised = options.cells**2, len(_select_candidates(images, steps[-1]))
    enough = min(_IMAGES_PER_CELL * cells, options.grids * cells, recognised)
    for step in steps:
        pool = _select_candidates(images, step)
        if len(pool) >= enough and len({one.label for one in pool}) >= cells:
            return step
    return steps[-1]


def build_grids(images: Sequence[ScannedImage], options: GridOptions) -> list[Grid]:
    """Build grids of the images that the model recognises, at most as many as there are such images."""
    pool = _select_candidates(images, options)
    return choose_grids(pool, replace(options, grids=max(1, min(options.grids, len(pool)))))


def load_or_build_grids(
    folder: RunFolder, model: str, images: Sequence[ScannedImage], metric: GridMetric
) -> tuple[list[Grid], str]:
    """Return the grids of a model as the run stores them, built if it has none yet, and a note for the report or ""."""
    name = f"grids/{_file_name(model)}.json"
    path = folder / name
    options = metric.options if metric.fixed else relax_confidence(images, metric.options)
    with folder.claim("grids", wait=True):
        if not path.exists():
            names = {one.index: one.name for one in images}
            built = build_grids(images, options)
            grids = [{**asdict(grid), "names": [names[i] for i in grid.images]} for grid in built]
            folder.write({name: json_bytes({"options": asdict(options), "grids": grids})})
    try:
        stored = [Grid(tuple(grid["images"]), tuple(grid["labels"])) for grid in json.loads(path.read_bytes())["grids"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(path, first_line(error)) from error
    return stored, _describe_grids(images, metric.options, options, len(stored))


def _describe_grids(images: Sequence[ScannedImage], usual: GridOptions, used: GridOptions, grids: int) -> str:
    """Return a note if there are no grids, or grids of images with a lower confidence than the metric asks for."""
    sure = f"predicted correctly with a confidence above {used.confidence:g}"
    if not grids:
        classes = len({one.label for one in _select_candidates(images, used)})
        how = "use more images or a lower confidence of the metric"
        return f"no grids: images of {classes} classes are {sure}, and a grid needs {used.cells**2}; {how}"
    if used.confidence < usual.confidence:
        few = f"only {len(_select_candidates(images, usual))} reach the metric's confidence of {usual.confidence:g}"
        return f"grids use images {sure}; {few}"
    return ""


def _select_candidates(images: Sequence[ScannedImage], options: GridOptions) -> list[GridCandidate]:
    hits = (one for one in images if one.predicted == one.label)
    pool = (GridCandidate(one.index, one.predicted, one.confidence or 0.0) for one in hits if one.predicted is not None)
    return [one for one in pool if one.confidence > options.confidence]
