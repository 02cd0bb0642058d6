"""The same pictures through several models: what each of them looks at."""

from __future__ import annotations

from torch import Tensor

from dave_vit.analysis.catalog import method_entry
from dave_vit.analysis.section import Picture, Section
from dave_vit.analysis.subjects import Pictures, Setting, load, pictures
from dave_vit.bench import Smoothing
from dave_vit.bench.subject import MapMaker
from dave_vit.viz import Drawing, draw, image_cell, map_cell


def section(setting: Setting, method: str = "dave") -> Section:
    """Maps of the class that each model sees in each picture.

    Args:
        setting: its models are compared.
        method: label of `dave_vit.analysis.catalog`.
    """
    maker = MapMaker(method_entry(method, setting.samples), Smoothing(), setting.seed)
    found: dict[str, tuple[Pictures, Tensor]] = {}
    for entry in setting.models:
        model = load(entry, setting.device)
        shown = pictures(model, setting, recognised=False)
        found[entry.label] = (shown, maker.maps(model, shown.inputs, shown.target))
    count = len(next(iter(found.values()))[0])
    facts = setting.facts(images=count, samples=setting.samples, method=method)
    text = (
        "Each row is a picture, each column a model; above a map, the class that the model sees and is explained for."
    )
    caption = "Positive part of each map over its own 99 % quantile."
    picture = Picture("models", figure(found, show=setting.show), caption, is_plot=False)
    return Section("models", "One picture, several models", text, facts, pictures=[picture])


def figure(found: dict[str, tuple[Pictures, Tensor]], *, show: bool = True) -> Drawing:
    """A row for each picture, a column for each model."""
    first = next(iter(found.values()))[0]
    rows = []
    for number in range(len(first)):
        cells = [image_cell(first.colours[number], "picture" if number == 0 else "")] if show else []
        cells += [map_cell(maps[number], _title(label, shown, number)) for label, (shown, maps) in found.items()]
        rows.append(cells)
    return draw(rows, width=1.9)


def _title(label: str, shown: Pictures, number: int) -> str:
    return f"{label}: {shown.titles[number]}"
