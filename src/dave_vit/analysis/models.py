"""The same pictures through several models: what each of them looks at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dave_vit.analysis.base import analysis
from dave_vit.analysis.inputs import (
    ImageBatch,
    MapAnalysisOptions,
    image_count_flag,
    image_files_flag,
    load_images,
    method_flag,
)
from dave_vit.evaluate import ModelEntry
from dave_vit.viz import Drawing, draw_grid, image_cell, map_cell
from dave_vit.viz.report_section import ReportFigure, Section


@dataclass(frozen=True)
class ModelComparisonOptions(MapAnalysisOptions):
    """Options of the analysis.

    Attributes:
        method: label of `dave_vit.analysis.catalog`.
    """

    images: tuple[str, ...] = image_files_flag()
    method: str = method_flag()
    models: tuple[ModelEntry, ...] = tuple(ModelEntry(name, label=name) for name in ("builtin", "builtin-bcos"))
    n: int = image_count_flag(3)


@analysis("models")
def compare_models(options: ModelComparisonOptions) -> Section:
    """The same pictures through several models; builtin and builtin-bcos where none is named."""
    maker = options.maker(options.method)
    maps: dict[str, tuple[ImageBatch, Tensor]] = {}
    for label, model in options.load():
        shown = load_images(model, options, recognised=False)
        maps[label] = (shown, maker.maps(model, shown.inputs, shown.target))
    images = len(next(iter(maps.values()))[0])
    facts = options.facts(images=images, samples=options.samples, method=options.method)
    text = (
        "Each row is a picture, each column a model; above a map, the class that the model sees and is explained for."
    )
    caption = "Positive part of each map over its own 99 % quantile."
    picture = ReportFigure("models", figure(maps, show=options.show), caption, is_plot=False)
    return Section("models", "One picture, several models", text, facts, pictures=[picture])


def figure(maps: dict[str, tuple[ImageBatch, Tensor]], *, show: bool = True) -> Drawing:
    """A row for each picture, a column for each model."""
    first = next(iter(maps.values()))[0]
    rows = []
    for number in range(len(first)):
        cells = [image_cell(first.colours[number], "picture" if number == 0 else "")] if show else []
        cells += [map_cell(own[number], f"{label}: {shown.titles[number]}") for label, (shown, own) in maps.items()]
        rows.append(cells)
    return draw_grid(rows, width=1.9)
