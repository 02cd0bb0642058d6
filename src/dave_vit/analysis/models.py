"""The same images through several models, to compare what each of them uses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dave_vit.analysis.base import analysis
from dave_vit.analysis.inputs import ImageBatch, MapAnalysisOptions, count_flag, files_flag, method_flag
from dave_vit.evaluate import ModelEntry
from dave_vit.viz import Drawing, draw_grid, image_cell, map_cell
from dave_vit.viz.report_section import ReportFigure, Section


@dataclass(frozen=True)
class ModelComparisonOptions(MapAnalysisOptions):
    """Options of the analysis.

    Attributes:
        method: label of `dave_vit.analysis.catalog`.
    """

    images: tuple[str, ...] = files_flag()
    method: str = method_flag()
    models: tuple[ModelEntry, ...] = tuple(ModelEntry(name, label=name) for name in ("builtin", "builtin-bcos"))
    n: int = count_flag(3)


@analysis("models")
def compare_models(options: ModelComparisonOptions) -> Section:
    """Show maps of the same images for several models; by default builtin and builtin-bcos."""
    maker = options.maker(options.method)
    columns: dict[str, tuple[ImageBatch, Tensor]] = {}
    for label, model, images in options.load_with_images(recognised=False):
        columns[label] = (images, maker.maps(model, images.inputs, images.target))
    facts = options.facts(images=len(images), samples=options.samples, method=options.method)
    text = "Each row is an image, each column a model; above a map, the predicted class, which is explained."
    caption = "Positive part of each map over its own 99 % quantile."
    figure = ReportFigure("models", draw_models(columns, show=options.show), caption, is_plot=False)
    return Section("models", "One image, several models", text, facts, pictures=[figure])


def draw_models(columns: dict[str, tuple[ImageBatch, Tensor]], *, show: bool = True) -> Drawing:
    """Draw a row for each image and a column for each model."""
    first = next(iter(columns.values()))[0]
    rows = []
    for index in range(len(first)):
        cells = [image_cell(first.colours[index], "picture" if index == 0 else "")] if show else []
        cells += [map_cell(maps[index], f"{label}: {own.titles[index]}") for label, (own, maps) in columns.items()]
        rows.append(cells)
    return draw_grid(rows, width=1.9)
