"""Pictures for the report: for each method, where it scores best, in the middle, and worst."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dave_vit.bench.numbers.collect import Collected, places
from dave_vit.bench.numbers.rows import Seen
from dave_vit.bench.plan import Plan

_Bytes = npt.NDArray[np.uint8]
PLACES = ("best", "median", "worst")
_PREFERRED = ("energypg", "deletion", "insertion")


@dataclass(frozen=True)
class Example:
    """An image that stands for a method's scores: its place, its number in the data set, and its score."""

    place: str
    image: Seen
    value: float


def example_metric(plan: Plan) -> str | None:
    """The label of the metric that picks the examples."""
    found = [entry for entry in plan.metrics if not entry.create().grids]
    found.sort(key=lambda entry: _PREFERRED.index(entry.metric) if entry.metric in _PREFERRED else len(_PREFERRED))
    return found[0].label if found else None


def choose_examples(plan: Plan, found: Collected, seen: Mapping[str, Seen], metric: str) -> list[list[Example]]:
    """The examples of each method; fewer where fewer images have a score."""
    table = found.tables.get(metric)
    if table is None:
        return [[] for _ in plan.methods]
    good = next(entry.create().higher_is_better for entry in plan.metrics if entry.label == metric)
    images, values = table.images, table.values
    chosen = []
    for row in values:
        order = places(row, higher_is_better=good)
        picks = dict(zip((0, len(order) // 2, len(order) - 1), PLACES, strict=False)) if len(order) else {}
        chosen.append([Example(place, seen[images[order[k]]], float(row[order[k]])) for k, place in picks.items()])
    return chosen


def picture(path: Path, index: int) -> tuple[bytes, bytes]:
    """An image and the map over it, from a file of maps, as JPEG."""
    from dave_vit.viz import overlay

    with np.load(path) as arrays:
        image, heat, region = (arrays[f"{name}-{index}"] for name in ("image", "map", "region"))
    over = (overlay(image, np.nan_to_num(heat)) * 255).round().astype(np.uint8)
    return _jpeg(_outlined(image, region)), _jpeg(_outlined(over, region))


def _outlined(image: _Bytes, region: npt.NDArray[np.bool_]) -> _Bytes:
    """The image with the edge of the object's region in white."""
    inner = region.copy()
    for axis in (0, 1):
        for step in (1, -1):
            inner &= np.roll(region, step, axis)
    out = image.copy()
    out[region & ~inner] = 255
    return out


def _jpeg(image: _Bytes) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def example_images(examples: Sequence[Example]) -> list[Seen]:
    """The images of some examples, each once."""
    return list({example.image.index: example.image for example in examples}.values())
