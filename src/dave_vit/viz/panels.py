"""The figures that commands, reports and notebooks show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dave_vit.methods import Explanation
from dave_vit.viz.cells import image_cell, map_cell, targets_cell, uncertainty_cell
from dave_vit.viz.figures import Cell, Drawing, draw
from dave_vit.viz.layers import QUANTILE, ImageLike, MapLike


@dataclass(frozen=True)
class Panel:
    """The map of one target in one image.

    Attributes:
        map: [H, W].
        target: its name, with whatever else belongs into the title.
        standard_error: of each pixel [H, W], where it is known.
    """

    map: MapLike
    target: str
    standard_error: MapLike | None = None


def side_by_side(image: ImageLike, panels: Sequence[Panel], *, title: str = "", quantile: float = QUANTILE) -> Drawing:
    """Image, map and uncertainty beside each other; several targets get a row of maps and one of uncertainties."""
    maps = [map_cell(each.map, each.target, quantile=quantile) for each in panels]
    errors = [
        uncertainty_cell(each.standard_error, quantile=quantile) for each in panels if each.standard_error is not None
    ]
    if len(panels) == 1:
        return draw([[image_cell(image), *maps, *errors]], title=title)
    together = targets_cell(image, [each.map for each in panels], [each.target for each in panels], "all targets")
    rows = [[image_cell(image), together], maps, errors]
    return draw([row for row in rows if row], title=title)


def comparison(
    images: Sequence[ImageLike],
    maps: Mapping[str, Sequence[Cell]],
    *,
    labels: Sequence[str] = (),
    title: str = "",
    width: float = 2.0,
) -> Drawing:
    """A grid with a row for each image and a column for each method.

    Args:
        images: as the model saw them.
        maps: from the method's name to one cell for each image; see `map_cell` and `signed_cell`.
        labels: one for each image, such as its target.
        title: above all.
        width: of a cell, in inches.
    """
    rows = []
    for number, image in enumerate(images):
        cells = [image_cell(image)] + [column[number].titled(name) for name, column in maps.items()]
        rows.append(cells if number == 0 else [cell.titled("") for cell in cells])
    return draw(rows, title=title, labels=labels, width=width)


def show(
    explanation: Explanation, images: Tensor | None = None, names: Sequence[str] | None = None, *, limit: int = 8
) -> Drawing:
    """An explanation as a figure, which shows itself in notebooks.

    Args:
        explanation: what `explain` of a method returned.
        images: colours in [0, 1], [B, 3, H, W], such as `model.preprocessing.picture(inputs)`; may be absent.
        names: of the classes, in the order of the logits.
        limit: at most so many images are drawn.
    """
    explained = panels_of(explanation, names)
    each = len(explained) // len(explanation.attribution)  # targets of an image
    rows = []
    for number, panel in enumerate(explained[: limit * each]):
        cells = [] if images is None else [image_cell(images[number // each])]
        cells.append(map_cell(panel.map, panel.target))
        if panel.standard_error is not None:
            cells.append(uncertainty_cell(panel.standard_error))
        rows.append(cells)
    return draw(rows, title=f"{explanation.samples} samples" if explanation.standard_error is not None else "")


def panels_of(explanation: Explanation, names: Sequence[str] | Mapping[int, str] | None = None) -> list[Panel]:
    """One for each image of a batch and each of its targets, the targets of an image after each other."""
    maps = list(explanation.map.flatten(0, -3))  # [B, H, W] or [B, K, H, W] -> [H, W] each
    classes = [] if explanation.target is None else explanation.target.flatten().tolist()
    titles = [f"class {index}" if names is None else names[index] for index in classes] or ["score"] * len(maps)
    error = explanation.standard_error
    errors = [None] * len(maps) if error is None else list(error.flatten(0, -3))
    return [Panel(*parts) for parts in zip(maps, titles, errors, strict=True)]
