"""What a cell of a figure can show: an image, a map in one of several ways, its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dave_vit.errors import OptionError
from dave_vit.viz.colors import HUES
from dave_vit.viz.figures import Bar, Cell
from dave_vit.viz.layers import (
    QUANTILE,
    ImageLike,
    MapLike,
    Scaled,
    as_image,
    blend,
    default_window,
    fitted,
    heat,
    overlay,
    scale,
    soften,
)


def image_cell(image: ImageLike, title: str = "image") -> Cell:
    """The image as it is."""
    return Cell(as_image(image), title)


def map_cell(values: MapLike, title: str = "map", *, quantile: float = QUANTILE) -> Cell:
    """A map in colours from dark violet to yellow; what speaks against the target is darkest."""
    scaled = scale(values, quantile=quantile)
    return Cell(heat(scaled), title, _bar(scaled, "dave"))


def signed_cell(values: MapLike, title: str = "signed map", *, quantile: float = QUANTILE) -> Cell:
    """A map with what speaks against the target: violet is for it, orange against it."""
    scaled = scale(values, quantile=quantile, signed=True)
    return Cell(heat(scaled, "dave_signed"), title, _bar(scaled, "dave_signed"))


def uncertainty_cell(errors: MapLike, title: str = "standard error", *, quantile: float = QUANTILE) -> Cell:
    """The standard error of each pixel of a map."""
    scaled = scale(errors, quantile=quantile)
    return Cell(heat(scaled, "dave_uncertainty"), title, _bar(scaled, "dave_uncertainty"))


def overlay_cell(
    image: ImageLike, values: MapLike, title: str = "map over image", *, quantile: float = QUANTILE
) -> Cell:
    """A map over its image, slightly smoothed."""
    scaled = scale(soften(values), quantile=quantile)
    bar = _bar(scaled, "dave")
    smoothed = f"{bar.caption}, {default_window(scaled.values.shape)} px window"
    return Cell(overlay(image, scaled), title, replace(bar, caption=smoothed))


def contour_cell(
    image: ImageLike,
    values: MapLike,
    title: str = "contours",
    *,
    shares: Sequence[float] = (0.5, 0.8),
    window: int = 15,
) -> Cell:
    """Lines around the brightest pixels that together hold some shares of the positive attribution.

    Args:
        image: as the model saw it.
        values: its map.
        title: above the cell.
        shares: of the sum of the positive part.
        window: side of the Gaussian window that smooths the map first, in pixels; odd.
    """
    if not all(0 < share < 1 for share in shares):
        raise OptionError(f"shares {tuple(shares)}; expected numbers between 0 and 1")
    smoothed = soften(values, window).numpy()
    ranked = np.sort(smoothed, axis=None)[::-1]
    held = np.cumsum(ranked) / (ranked.sum() or 1.0)  # by the brightest pixels, more and more of them
    levels = [float(ranked[np.searchsorted(held, share)]) for share in shares]
    colours = [HUES[index % len(HUES)] for index in range(len(levels))]
    legend = tuple((colour, f"{share:.0%} of the positive part") for colour, share in zip(colours, shares, strict=True))
    lines = tuple(zip(levels, colours, strict=True)) if smoothed.max() > 0 else ()
    return Cell(fitted(image, smoothed.shape), title, legend=legend, contours=(smoothed, lines))


def targets_cell(image: ImageLike, maps: Sequence[MapLike], names: Sequence[str], title: str = "targets") -> Cell:
    """Maps of several targets over one image, a hue for each; every map has its own scale."""
    legend = tuple((HUES[index % len(HUES)], name) for index, name in enumerate(names))
    return Cell(blend(image, maps), title, legend=legend)


def _bar(scaled: Scaled, colormap: str) -> Bar:
    return Bar(colormap, scaled.limit, scaled.caption, scaled.signed)
