"""Class-consistency sheets: several pictures of one class and their maps, to see what recurs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dave_vit.analysis.base import analysis, flag
from dave_vit.analysis.inputs import ImageBatch, MapAnalysisOptions, image_count_flag, method_flag, shown_data
from dave_vit.data import Dataset, open_dataset
from dave_vit.data.classes import map_classes
from dave_vit.engine.forward import logits_of
from dave_vit.engine.target_names import find_class
from dave_vit.errors import DataError, ImageError
from dave_vit.models import Adapter
from dave_vit.viz import Cell, Drawing, draw_grid, image_cell, map_cell
from dave_vit.viz.report_section import ReportFigure, Section

_CLASSES = 3  # where none are named


@dataclass(frozen=True)
class ClassesOptions(MapAnalysisOptions):
    """Options of the analysis; n is the number of pictures of each class.

    Attributes:
        names: of classes; those with the most pictures where there are none.
        method: label of `dave_vit.analysis.catalog`.
    """

    names: tuple[str, ...] = flag((), "Names or indices.", metavar="CLASS", positional=True)
    method: str = method_flag()
    n: int = image_count_flag(4)


@analysis("classes", first_model=True)
def analyze_classes(options: ClassesOptions) -> Section:
    """Several pictures of one class and their maps, to see what recurs."""
    _, model = next(options.load())
    wanted = [find_class(name, model.class_names) for name in options.names]
    sheets = of_classes(model, options.data, options.n, wanted)
    maker = options.maker(options.method)
    maps = {label: maker.maps(model, shown.inputs, shown.target) for label, shown in sheets.items()}
    facts = options.facts(images=f"{options.n} per class", samples=options.samples, method=options.method)
    text = "Maps of pictures of one class that the model recognises: what recurs is what the class is."
    caption = "Positive part of each map over its own 99 % quantile."
    picture = ReportFigure("classes", figure(sheets, maps, show=options.show), caption, is_plot=False)
    return Section("classes", "Class-consistent features", text, facts, pictures=[picture])


def of_classes(model: Adapter, data_spec: str, each: int, wanted: Sequence[int] = ()) -> dict[int, ImageBatch]:
    """Recognised pictures of some classes, by class of the model.

    Args:
        model: that recognises them.
        data_spec: of a data set.
        each: pictures of a class, at most.
        wanted: classes; those with the most pictures where there are none.
    """
    data = open_dataset(data_spec)
    places = _places(data, map_classes(data.class_names, model.class_names), each + 1, wanted)
    sheets: dict[int, list[Tensor]] = {}
    enough, several = len(wanted) or _CLASSES, 0
    for label, indices in places.items():
        known = [inputs for index in indices if (inputs := _recognised(model, data, index, label)) is not None]
        sheets |= {label: known[:each]} if known else {}
        several += len(known) >= min(2, each)  # a sheet of one picture shows nothing that recurs
        if several == enough:
            break
    if not sheets:
        raise DataError(f"{shown_data(data_spec)}: no picture of the classes is recognised; name others")
    sheets = dict(sorted(sheets.items(), key=lambda entry: -len(entry[1]))[:enough])
    return {label: _pictures(model, label, inputs) for label, inputs in sheets.items()}


def _places(data: Dataset, classes: dict[int, int], each: int, wanted: Sequence[int]) -> dict[int, list[int]]:
    """Numbers of pictures by class, most pictures first; reading stops when enough classes have enough of them."""
    places: dict[int, list[int]] = {label: [] for label in wanted}
    enough, full = len(wanted) or _CLASSES, 0
    for index in range(len(data)):
        known = data[index].label
        label = None if known is None else classes.get(known)
        if label is None or (wanted and label not in places) or len(places.get(label, [])) == each:
            continue
        places.setdefault(label, []).append(index)
        full += len(places[label]) == each
        if full == enough:
            break
    return dict(sorted(places.items(), key=lambda entry: -len(entry[1])))


def _recognised(model: Adapter, data: Dataset, index: int, label: int) -> Tensor | None:
    try:
        inputs = model.preprocess(data.image(index))
    except ImageError:
        return None
    return inputs if int(logits_of(model, inputs)[0].argmax()) == label else None


def _pictures(model: Adapter, label: int, inputs: Sequence[Tensor]) -> ImageBatch:
    together = torch.cat(list(inputs))
    target = torch.full((len(together),), label, device=together.device)
    titles = [model.class_names[label].split(",")[0]] * len(together)
    return ImageBatch(together, target, titles, model.preprocessing.picture(together))


def figure(sheets: dict[int, ImageBatch], maps: dict[int, Tensor], *, show: bool = True) -> Drawing:
    """Two rows for each class: pictures, and their maps."""
    rows: list[list[Cell]] = []
    labels = []
    for label, shown in sheets.items():
        if show:
            rows.append([image_cell(colours, "") for colours in shown.colours])
        rows.append([replace(map_cell(values, ""), bar=None) for values in maps[label]])
        labels += [shown.titles[0], "map"] if show else [shown.titles[0]]
    return draw_grid(rows, labels=labels, width=1.5)
