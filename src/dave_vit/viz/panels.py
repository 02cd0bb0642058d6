"""The figures of commands, reports and notebooks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from dave_vit.methods import Explanation
from dave_vit.viz.colors import Array
from dave_vit.viz.figures import Cell, Drawing, certainty_cell, draw_grid, image_cell, map_cell, targets_cell
from dave_vit.viz.rendering import ImageLike, Panel, Scales, View, as_map

CERTAINTY = "Certainty: standard errors between the average of all samples and zero; below 2 it may be chance."


def panel_cells(panels: Sequence[Panel], *, view: View = "map", scales: Scales = "shared") -> list[Cell]:
    """Return the cells of maps that stand beside each other.

    Args:
        panels: of one unit, where they share a scale.
        view: evidence for the target, or evidence for and against it.
        scales: one for all, so that brightness can be compared, or one for each.
    """
    like = [each.values(view) for each in panels] if scales == "shared" else None
    signed = view == "signed"
    return [map_cell(each.values(view), each.target, signed=signed, like=like, unit=each.unit) for each in panels]


def draw_side_by_side(
    image: ImageLike,
    panels: Sequence[Panel],
    *,
    title: str = "",
    view: View = "map",
    scales: Scales = "shared",
    notes: Sequence[str] = (),
    beneath: ImageLike | None = None,
    overlay: ImageLike | None = None,
    align: Callable[[Array], Array] = lambda colours: colours,
) -> Drawing:
    """Draw image, overlay, map and certainty beside each other; several targets get a row of maps and one of certainty.

    Args:
        image: as the model saw it.
        panels: one for each target.
        title: above all.
        view: see `panel_cells`.
        scales: see `panel_cells`.
        notes: sentences below, after the one that explains certainty.
        beneath: the image under the maps of several targets, if `image` shows more than the maps.
        overlay: the maps over the image.
        align: from the colours of a map to a picture in the image's proportions.
    """
    maps = [_align(cell, align) for cell in panel_cells(panels, view=view, scales=scales)]
    sure = [_align(certainty_cell(each.certainty), align) for each in panels if each.certainty is not None]
    footer = [*([CERTAINTY] if sure else []), *notes]
    if len(panels) == 1:
        pictures = [image_cell(image), *([] if overlay is None else [image_cell(overlay, "overlay")])]
        return draw_grid([[*pictures, *maps, *sure]], title=title, notes=footer)
    if view == "signed" and overlay is not None:  # a hue for each target would be one for evidence as well
        first = [[image_cell(image)], [replace(image_cell(overlay, "overlay"), span=len(panels))]]
    else:
        under, names = image if beneath is None else beneath, [each.target for each in panels]
        blended = targets_cell(under, [each.map for each in panels], names, shared=scales == "shared")
        first = [[image_cell(image), _align(blended, align)]]
    return draw_grid([row for row in [*first, maps, sure] if row], title=title, notes=footer)


def _align(cell: Cell, align: Callable[[Array], Array]) -> Cell:
    return replace(cell, colours=align(cell.colours))


def draw_comparison(
    images: Sequence[ImageLike],
    maps: Mapping[str, Sequence[Cell]],
    *,
    labels: Sequence[str] = (),
    title: str = "",
    width: float = 2.0,
) -> Drawing:
    """Draw a grid with a row for each image and a column for each method.

    Args:
        images: as the model saw them.
        maps: from the method's name to one cell for each image; see `map_cell`.
        labels: one for each image, such as its target.
        title: above all.
        width: of a cell, in inches.
    """
    rows = []
    for number, image in enumerate(images):
        cells = [image_cell(image)] + [replace(column[number], title=name) for name, column in maps.items()]
        rows.append(cells if number == 0 else [replace(cell, title="") for cell in cells])
    return draw_grid(rows, title=title, labels=labels, width=width)


def draw_strip(
    pictures: Sequence[ImageLike],
    titles: Sequence[str],
    *,
    columns: int,
    above: Cell | None = None,
    notes: Sequence[str] = (),
) -> Drawing:
    """Draw pictures row by row, each below its title; above all of them a cell, and below them notes."""
    cells = [image_cell(picture, title) for picture, title in zip(pictures, titles, strict=True)]
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    return draw_grid(rows if above is None else [[above], *rows], width=1.5, notes=notes)


def show(
    explanation: Explanation,
    images: Tensor | None = None,
    names: Sequence[str] | None = None,
    *,
    limit: int = 8,
    view: View = "map",
    scales: Scales = "shared",
) -> Drawing:
    """Draw an explanation as a figure, which notebooks display.

    Args:
        explanation: what `explain` of a method returned.
        images: colours in [0, 1], [B, 3, H, W], such as `model.preprocessing.picture(inputs)`; by default those that
            were explained.
        names: of the classes, in the order of the logits; the model's by default.
        limit: largest number of images to draw.
        view: see `panel_cells`.
        scales: see `panel_cells`.
    """
    subject = explanation.subject
    if subject is not None:
        images, names = subject.pictures if images is None else images, subject.names if names is None else names
    explained = build_panels(explanation, names, unit=explanation.unit)
    pictures = len(explanation.attribution) if images is None else len(images)  # of clips each frame is one
    each = len(explained) // pictures  # targets of an image
    shown = explained[: limit * each]
    rows = []
    for number, (panel, cell) in enumerate(zip(shown, panel_cells(shown, view=view, scales=scales), strict=True)):
        cells = [cell] if images is None else [image_cell(images[number // each]), cell]
        rows.append(cells if panel.certainty is None else [*cells, certainty_cell(panel.certainty)])
    warnings = list(dict.fromkeys(f"Note: {warning}." for warning in explanation.warnings[:limit] if warning))
    sure = [CERTAINTY] if explanation.certainty is not None else []
    rivals = ["each class against its rivals"] if "rivals" in (explanation.against or ()) else []
    counted = [f"{explanation.samples} samples"] if explanation.standard_error is not None else []
    return draw_grid(rows, title=", ".join([*counted, *rivals]), notes=[*sure, *warnings])


def build_panels(
    explanation: Explanation, names: Sequence[str] | Mapping[int, str] | None = None, *, unit: str = ""
) -> list[Panel]:
    """Return one panel for each image of a batch and each of its targets, the targets of an image after each other."""
    maps = list(explanation.map.flatten(0, -3))  # [B, H, W], [B, K, H, W] or more -> [H, W] each
    classes = [] if explanation.target is None else explanation.target.flatten().tolist()
    titles = [_name(index, names) for index in classes] or ["score"]
    if explanation.against and classes:
        others = [index for index in explanation.against for _ in range(len(classes) // len(explanation.against))]
        pairs = zip(titles, others, strict=True)
        titles = [f"{title}, not {_name(other, names)}" if isinstance(other, int) else title for title, other in pairs]
    titles = [title for title in titles for _ in range(len(maps) // len(titles))]  # of clips each frame has a map
    beside = [explanation.standard_error, explanation.signed, explanation.certainty]
    columns = [[None] * len(maps) if one is None else list(one.flatten(0, -3)) for one in beside]
    parts = zip(maps, titles, *columns, strict=True)
    panels = [Panel(shown, title, error, signed, sure, unit) for shown, title, error, signed, sure in parts]
    return [_scale_to_range(panel) for panel in panels] if explanation.unit == "range" else panels


def _scale_to_range(panel: Panel) -> Panel:
    """Return a panel whose map runs from 0, its smallest value, to 1, its largest."""
    values = as_map(panel.map)
    extent = float(values.max() - values.min()) or 1.0
    error = None if panel.standard_error is None else as_map(panel.standard_error) / extent
    return replace(panel, map=(values - values.min()) / extent, standard_error=error, unit="of its range")


def _name(index: int, names: Sequence[str] | Mapping[int, str] | None) -> str:
    known = names is not None and (not isinstance(names, Mapping) or index in names)
    return names[index] if names is not None and known else f"class {index}"
