"""Class-consistency sheets: several images of one class and their maps, to see what recurs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from dave_vit.analysis.base import analysis, flag
from dave_vit.analysis.inputs import (
    ImageBatch,
    MapAnalysisOptions,
    count_flag,
    hide_folders,
    method_flag,
    preprocess_image,
    short_name,
)
from dave_vit.data import Dataset, open_dataset
from dave_vit.data.classes import map_classes
from dave_vit.engine.forward import compute_logits
from dave_vit.engine.target_names import find_class
from dave_vit.errors import DataError
from dave_vit.models import Adapter
from dave_vit.viz import Cell, Drawing, draw_grid, image_cell, map_cell
from dave_vit.viz.report_section import ReportFigure, Section

_CLASSES = 3  # number of classes where none are named


@dataclass(frozen=True)
class ClassesOptions(MapAnalysisOptions):
    """Options of the analysis; n is the number of images of each class.

    Attributes:
        names: names or indices of classes; by default those with the most images.
        method: label of `dave_vit.analysis.catalog`.
    """

    names: tuple[str, ...] = flag((), "Names or indices of classes.", metavar="CLASS", positional=True)
    method: str = method_flag()
    n: int = count_flag(4)


@analysis("classes", first_model=True)
def analyze_classes(options: ClassesOptions) -> Section:
    """Show several images of one class with their maps, to see what recurs."""
    _, model = next(options.load())
    labels = [find_class(name, model.class_names) for name in options.names]
    sheets = load_classes(model, options.data, options.n, labels)
    maker = options.maker(options.method)
    maps = {label: maker.maps(model, images.inputs, images.target) for label, images in sheets.items()}
    facts = options.facts(images=f"{options.n} per class", samples=options.samples, method=options.method)
    text = "Maps of images of one class that the model recognises: what recurs is what the class is."
    caption = "Positive part of each map over its own 99 % quantile."
    figure = ReportFigure("classes", draw_sheets(sheets, maps, show=options.show), caption, is_plot=False)
    return Section("classes", "Class-consistent features", text, facts, pictures=[figure])


def load_classes(model: Adapter, spec: str, count: int, labels: Sequence[int] = ()) -> dict[int, ImageBatch]:
    """Load recognised images of some classes, by class of the model.

    Args:
        model: has to recognise them.
        spec: names a data set.
        count: most images of a class.
        labels: classes; by default those with the most images.
    """
    data = open_dataset(spec)
    sheets: dict[int, ImageBatch] = {}
    needed = len(labels) or _CLASSES
    for label, indices in _find_candidates(model, data, count + 1, labels).items():
        images = [image for index in indices if (image := preprocess_image(model, data, index)) is not None]
        images = [image for image in images if int(compute_logits(model, image)[0].argmax()) == label][:count]
        if images:
            titles = [short_name(model, label)] * len(images)
            sheets[label] = ImageBatch.build(model, images, [label] * len(images), titles)
        # A sheet of one image shows nothing that recurs.
        if sum(len(sheet) >= min(2, count) for sheet in sheets.values()) == needed:
            break
    if not sheets:
        raise DataError(f"{hide_folders(spec)}: the model recognises no image of these classes; name others")
    return dict(sorted(sheets.items(), key=lambda sheet: -len(sheet[1]))[:needed])


def _find_candidates(model: Adapter, data: Dataset, count: int, labels: Sequence[int]) -> dict[int, list[int]]:
    """Return indices of images by class, most images first; stops when enough classes have ``count`` of them."""
    classes = map_classes(data.class_names, model.class_names)
    candidates: dict[int, list[int]] = {label: [] for label in labels}
    classes_needed, classes_full = len(labels) or _CLASSES, 0
    for index in range(len(data)):
        own = data[index].label
        label = None if own is None else classes.get(own)
        if label is None or (labels and label not in candidates) or len(candidates.get(label, [])) == count:
            continue
        candidates.setdefault(label, []).append(index)
        classes_full += len(candidates[label]) == count
        if classes_full == classes_needed:
            break
    return dict(sorted(candidates.items(), key=lambda candidate: -len(candidate[1])))


def draw_sheets(sheets: dict[int, ImageBatch], maps: dict[int, Tensor], *, show: bool = True) -> Drawing:
    """Draw two rows for each class: images, and their maps."""
    rows: list[list[Cell]] = []
    labels: list[str] = []
    for label, images in sheets.items():
        if show:
            rows.append([image_cell(colours, "") for colours in images.colours])
        rows.append([replace(map_cell(values, ""), bar=None) for values in maps[label]])
        labels += [images.titles[0], "map"] if show else [images.titles[0]]
    return draw_grid(rows, labels=labels, width=1.5)
