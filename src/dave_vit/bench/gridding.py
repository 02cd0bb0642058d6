"""The grids of a run: built once per model from what the scan found, and kept with the run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from dave_vit.atomic import json_bytes
from dave_vit.bench.numbers.rows import Seen
from dave_vit.bench.store import RunFolder
from dave_vit.data.grids import Candidate, Grid, GridOptions, choose_grids
from dave_vit.metrics.localization import GridPG

_LADDER = (0.9, 0.8, 0.5, 0.0)  # tried in turn where the usual confidence leaves too few images


@dataclass(frozen=True)
class GridSet:
    """The grids of a model, and what a reader should know of them ("" where there is nothing)."""

    grids: list[Grid]
    note: str


def settle(seen: Sequence[Seen], options: GridOptions) -> GridOptions:
    """The options with a confidence that leaves enough images, for models that are hardly ever sure.

    Models trained with smoothed labels seldom exceed 0.95. Enough are four images per cell, of as many classes as
    cells; the highest step of the ladder that has them is taken, or the last.
    """
    for confidence in (options.confidence, *(step for step in _LADDER if step < options.confidence)):
        tried = replace(options, confidence=confidence)
        pool = _pool(seen, tried)
        if len(pool) >= 4 * options.cells**2 and len({one.label for one in pool}) >= options.cells**2:
            break
    return tried


def build_grids(seen: Sequence[Seen], options: GridOptions) -> list[Grid]:
    """Grids of the images that the model recognises; no more of them than there are such images."""
    pool = _pool(seen, options)
    return choose_grids(pool, replace(options, grids=max(1, min(options.grids, len(pool)))))


def kept_grids(folder: RunFolder, model: str, seen: Sequence[Seen], metric: GridPG) -> GridSet:
    """The grids of a model as the run keeps them, built where it has none yet."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", model)
    path = folder / f"grids/{name}.json"
    options = metric.options if metric.fixed else settle(seen, metric.options)
    with folder.claim("grids", wait=True):
        if not path.exists():
            names = {one.index: one.name for one in seen}
            made = [
                {"images": list(grid.images), "labels": list(grid.labels), "names": [names[i] for i in grid.images]}
                for grid in build_grids(seen, options)
            ]
            folder.write({f"grids/{name}.json": json_bytes({"options": asdict(options), "grids": made})})
    content = json.loads(path.read_bytes())
    grids = [Grid(tuple(grid["images"]), tuple(grid["labels"])) for grid in content["grids"]]
    return GridSet(grids, _note(seen, metric.options, options, len(grids)))


def _note(seen: Sequence[Seen], wanted: GridOptions, used: GridOptions, grids: int) -> str:
    if not grids:
        classes = len({one.label for one in _pool(seen, used)})
        sure = f"images of {classes} classes are recognised with more than {used.confidence:g}"
        return f"no grids: {sure}, and a grid needs {used.cells**2}; use more images or a lower gridpg.confidence"
    if used.confidence < wanted.confidence:
        few = f"only {len(_pool(seen, wanted))} are recognised with more than {wanted.confidence:g}"
        return f"grids of images that are recognised with more than {used.confidence:g}: {few}"
    return ""


def _pool(seen: Sequence[Seen], options: GridOptions) -> list[Candidate]:
    return [
        Candidate(one.index, one.label, one.confidence)
        for one in seen
        if one.label is not None
        and one.label == one.predicted
        and one.confidence is not None
        and one.confidence > options.confidence
    ]
