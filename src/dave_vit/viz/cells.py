"""The cells of a figure: an image, a map, its certainty, or the maps of several targets."""

from __future__ import annotations

from collections.abc import Sequence

from dave_vit.viz.colors import HUES, colorize
from dave_vit.viz.figures import Cell, ScaleBar
from dave_vit.viz.rendering import ImageLike, MapLike, as_image, as_map, blend, colorize_map, scale_map

MAX_CERTAINTY = 5.0
"""Standard errors at the end of the scale of certainty."""


def image_cell(image: ImageLike, title: str = "image") -> Cell:
    """Return the image as it is."""
    return Cell(as_image(image), title)


def map_cell(
    values: MapLike, title: str = "map", *, signed: bool = False, like: Sequence[MapLike] | None = None, unit: str = ""
) -> Cell:
    """Return a map in colours, with its scale bar.

    Args:
        values: the map [H, W].
        title: above it.
        signed: evidence for the target in violet and against it in orange; otherwise from dark violet to yellow, and
            evidence against the target is darkest.
        like: other maps that share its scale; see `scale_map`.
        unit: of its values.
    """
    scaled, colormap = scale_map(values, signed=signed, like=like), "dave_signed" if signed else "dave"
    bar = ScaleBar(colormap, scaled.limit, scaled.caption, signed, unit)
    return Cell(colorize_map(scaled, colormap), title, bar)


def certainty_cell(values: MapLike, title: str = "certainty") -> Cell:
    """Return the standard errors between each pixel and zero; the scale is the same in all figures."""
    colours = colorize((as_map(values) / MAX_CERTAINTY).clamp(0, 1).numpy(), "dave_uncertainty")
    return Cell(colours, title, ScaleBar("dave_uncertainty", MAX_CERTAINTY, "", unit="standard errors or more"))


def targets_cell(
    image: ImageLike, maps: Sequence[MapLike], names: Sequence[str], title: str = "targets", *, shared: bool = True
) -> Cell:
    """Return the maps of several targets over one image, a hue for each; on one scale, or each on its own."""
    legend = tuple((HUES[index % len(HUES)], name) for index, name in enumerate(names))
    return Cell(blend(image, maps, shared=shared), title, legend=legend)
