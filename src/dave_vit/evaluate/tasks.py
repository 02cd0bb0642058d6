"""Tasks: pieces of a run that are computed whole, each known by a key of its content and kept as one file.

Which grids there are is settled here as well: once per model, from what the scan tells, and kept with the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dave_vit._internal.atomic_files import json_bytes
from dave_vit.data.grids import Grid, GridCandidate, GridOptions, choose_grids
from dave_vit.errors import first_line
from dave_vit.evaluate.plan import Plan
from dave_vit.evaluate.plan_entries import hash_content
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.evaluate.store import DamagedFile, RunFolder
from dave_vit.metrics import GridMetric

Kind = Literal["scan", "images", "grids", "examples"]
_LADDER = (0.9, 0.8, 0.5, 0.0)  # tried in turn where the usual confidence leaves too few images
_IMAGES_PER_CELL = 25  # grids are as many as images at most
_FILES = {"scan": "scan/{}.parquet", "images": "rows/{}.parquet", "grids": "rows/{}.parquet"}


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A piece of work.

    Attributes:
        kind: "scan" (what the model makes of images), "images" and "grids" (rows), "examples" (maps for the report).
        name: of its file, without folder and ending; holds the key.
        model: place in the plan.
        method: place in the plan; -1 for a scan.
        seed: of the method.
        start: place of its first image or grid among those of the run.
        images: numbers in the data set, one or several for each target.
        targets: the explained class of each image; for a grid, those of its cells.
        last: it is not tried again, so that images for which memory does not suffice are dropped.
    """

    kind: Kind
    name: str
    model: int
    method: int
    seed: int
    start: int
    images: tuple[int, ...]
    targets: tuple[int, ...] = ()
    last: bool = False

    @property
    def file(self) -> str:
        """What exists when the task is done, relative to the run."""
        return _FILES.get(self.kind, "examples/{}.npz").format(self.name)

    @property
    def maps_file(self) -> str:
        """Where its maps go, relative to the run."""
        return f"maps/{self.name}.npz"

    @property
    def chunk(self) -> tuple[int, str, int]:
        """Tasks with the same one read the same images."""
        return self.model, self.kind, self.start


class TaskBuilder:
    """Makes the tasks of a plan.

    Args:
        plan: the plan.
        document: its content, as the run keeps it.
    """

    def __init__(self, plan: Plan, document: dict[str, Any]) -> None:
        self.plan = plan
        shared = ("data", "smoothing", "batch", "save_maps")
        self._shared = {name: document[name] for name in shared}
        self._models, self._methods, self._metrics = (document[name] for name in ("models", "methods", "metrics"))

    def scans(self, count: int) -> list[EvalTask]:
        """What each model makes of ``count`` images."""
        return [
            self._task("scan", model, -1, 0, start, tuple(range(start, min(start + self.plan.shard, count))))
            for model in range(len(self.plan.models))
            for start in range(0, count, self.plan.shard)
        ]

    def images(self, model: int, chosen: Sequence[ScannedImage]) -> list[EvalTask]:
        """Rows of image metrics; methods in turn for each shard of images, so that it is read once."""
        made = []
        for start in range(0, len(chosen), self.plan.shard):
            part = chosen[start : start + self.plan.shard]
            numbers = tuple(one.index for one in part)
            targets = tuple(self.target(one) for one in part)
            made += [
                self._task("images", model, method, seed, start, numbers, targets) for method, seed in self._ways()
            ]
        return made

    def grids(self, model: int, grids: Sequence[Grid]) -> list[EvalTask]:
        """Rows of grid metrics."""
        made = []
        step = max(1, self.plan.shard // len(grids[0].images)) if grids else 1
        for start in range(0, len(grids), step):
            part = grids[start : start + step]
            numbers = tuple(index for grid in part for index in grid.images)
            targets = tuple(label for grid in part for label in grid.labels)
            made += [self._task("grids", model, method, seed, start, numbers, targets) for method, seed in self._ways()]
        return made

    def examples(self, model: int, method: int, chosen: Sequence[ScannedImage]) -> EvalTask:
        """Maps of some images for the report."""
        numbers = tuple(one.index for one in chosen)
        targets = tuple(self.target(one) for one in chosen)
        seed = self.plan.methods[method].select_seeds(self.plan.seeds)[0]
        return self._task("examples", model, method, seed, 0, numbers, targets)

    def target(self, image: ScannedImage) -> int:
        """The class that is explained."""
        wanted = image.label if self.plan.target == "label" and image.label is not None else image.predicted
        return -1 if wanted is None else wanted

    def _ways(self) -> Iterator[tuple[int, int]]:
        """Methods and their seeds."""
        for place, entry in enumerate(self.plan.methods):
            for seed in entry.select_seeds(self.plan.seeds):
                yield place, seed

    def _task(
        self,
        kind: Kind,
        model: int,
        method: int,
        seed: int,
        start: int,
        images: tuple[int, ...],
        targets: tuple[int, ...] = (),
    ) -> EvalTask:
        how = self._methods[method] if method >= 0 else None
        content = [self._shared, self._models[model], how, self._metrics, kind, seed, start, images, targets]
        who = self.plan.methods[method].label if method >= 0 else self.plan.models[model].label
        name = f"{_file_name(who)}-{kind}-{start:06d}-{hash_content(content)[:16]}"
        return EvalTask(kind, name, model, method, seed, start, images, targets)


def _file_name(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", label)


@dataclass(frozen=True)
class GridSet:
    """The grids of a model, and what a reader should know of them ("" where there is nothing)."""

    grids: list[Grid]
    note: str


def relax_confidence(images: Sequence[ScannedImage], options: GridOptions) -> GridOptions:
    """The options with a confidence that leaves enough images, for models that are hardly ever sure.

    Models trained with smoothed labels seldom exceed 0.95. Enough are 25 images per cell, which make 100 grids of 2x2,
    of as many classes as cells; fewer where fewer grids are wanted or fewer images are recognised at all. The highest
    step of the ladder that has them is taken.
    """
    steps = [replace(options, confidence=step) for step in (options.confidence, *_LADDER) if step <= options.confidence]
    cells, all_known = options.cells**2, len(_pool(images, steps[-1]))
    enough = min(_IMAGES_PER_CELL * cells, options.grids * cells, all_known)
    for tried in steps:
        pool = _pool(images, tried)
        if len(pool) >= enough and len({one.label for one in pool}) >= cells:
            return tried
    return steps[-1]


def build_grids(images: Sequence[ScannedImage], options: GridOptions) -> list[Grid]:
    """Grids of the images that the model recognises; no more of them than there are such images."""
    pool = _pool(images, options)
    return choose_grids(pool, replace(options, grids=max(1, min(options.grids, len(pool)))))


def load_or_build_grids(folder: RunFolder, model: str, images: Sequence[ScannedImage], metric: GridMetric) -> GridSet:
    """The grids of a model as the run keeps them, built where it has none yet."""
    name = f"grids/{_file_name(model)}.json"
    path = folder / name
    options = metric.options if metric.fixed else relax_confidence(images, metric.options)
    with folder.claim("grids", wait=True):
        if not path.exists():
            names = {one.index: one.name for one in images}
            made = [
                {"images": list(grid.images), "labels": list(grid.labels), "names": [names[i] for i in grid.images]}
                for grid in build_grids(images, options)
            ]
            folder.write({name: json_bytes({"options": asdict(options), "grids": made})})
    try:
        content = json.loads(path.read_bytes())
        grids = [Grid(tuple(grid["images"]), tuple(grid["labels"])) for grid in content["grids"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(path, first_line(error)) from error
    return GridSet(grids, _note(images, metric.options, options, len(grids)))


def _note(images: Sequence[ScannedImage], wanted: GridOptions, used: GridOptions, grids: int) -> str:
    if not grids:
        classes = len({one.label for one in _pool(images, used)})
        sure = f"images of {classes} classes are recognised with more than {used.confidence:g}"
        return (
            f"no grids: {sure}, and a grid needs {used.cells**2}; use more images or a lower confidence of the metric"
        )
    if used.confidence < wanted.confidence:
        few = f"only {len(_pool(images, wanted))} are recognised with more than {wanted.confidence:g}"
        return f"grids of images that are recognised with more than {used.confidence:g}: {few}"
    return ""


def _pool(images: Sequence[ScannedImage], options: GridOptions) -> list[GridCandidate]:
    return [
        GridCandidate(one.index, one.label, one.confidence)
        for one in images
        if one.label is not None
        and one.label == one.predicted
        and one.confidence is not None
        and one.confidence > options.confidence
    ]
