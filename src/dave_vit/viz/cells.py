"""What a cell of a figure can show: an image, a map in one of several ways, its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dave_vit.errors import OptionError
from dave_vit.viz.colors import HUES
from dave_vit.viz.figures import Cell, ScaleBar
from dave_vit.viz.rendering import (
    QUANTILE,
    ImageLike,
    MapLike,
    ScaledMap,
    as_image,
    as_map,
    blend,
    colorize_map,
    default_window,
    overlay,
    resize_image,
    scale_map,
    smooth_for_overlay,
)

Like = Sequence[MapLike] | None
MOST_SURE = 5.0
"""Standard errors at the end of the scale of sureness."""


def image_cell(image: ImageLike, title: str = "image") -> Cell:
    """The image as it is."""
    return Cell(as_image(image), title)


def map_cell(
    values: MapLike, title: str = "map", *, quantile: float = QUANTILE, like: Like = None, unit: str = ""
) -> Cell:
    """A map in colours from dark violet to yellow; what speaks against the target is darkest.

    Args:
        values: the map.
        title: above it.
        quantile: of its values that becomes the brightest colour.
        like: other maps that share its scale; see `scale`.
        unit: of its values.
    """
    scaled = scale_map(values, quantile=quantile, like=like)
    return Cell(colorize_map(scaled), title, _bar(scaled, "dave", unit))


def signed_cell(
    values: MapLike, title: str = "signed map", *, quantile: float = QUANTILE, like: Like = None, unit: str = ""
) -> Cell:
    """A map with what speaks against the target: violet is for it, orange against it; the rest as of `map_cell`."""
    scaled = scale_map(values, quantile=quantile, signed=True, like=like)
    return Cell(colorize_map(scaled, "dave_signed"), title, _bar(scaled, "dave_signed", unit))


def uncertainty_cell(
    errors: MapLike, title: str = "standard error", *, quantile: float = QUANTILE, like: Like = None, unit: str = ""
) -> Cell:
    """The standard error of each pixel of a map; `like` that map, the two can be compared."""
    scaled = scale_map(errors, quantile=quantile, like=like)
    return Cell(colorize_map(scaled, "dave_uncertainty"), title, _bar(scaled, "dave_uncertainty", unit))


def sureness_cell(values: MapLike, title: str = "sureness") -> Cell:
    """How many standard errors stand behind each pixel; the scale is the same in all pictures."""
    shown = (as_map(values) / MOST_SURE).clamp(0, 1).numpy()
    bar = ScaleBar("dave_uncertainty", MOST_SURE, "", unit="standard errors or more")
    return Cell(colorize_map(ScaledMap(shown, MOST_SURE, 1.0), "dave_uncertainty"), title, bar)


def overlay_cell(
    image: ImageLike,
    values: MapLike,
    title: str = "map over image",
    *,
    quantile: float = QUANTILE,
    signed: bool = False,
) -> Cell:
    """A map over its image, slightly smoothed; signed, with what speaks against the target in orange."""
    scaled = scale_map(smooth_for_overlay(values, signed=signed), quantile=quantile, signed=signed)
    bar = _bar(scaled, "dave_signed" if signed else "dave")
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
    smoothed = smooth_for_overlay(values, window).numpy()
    ranked = np.sort(smoothed, axis=None)[::-1]
    held = np.cumsum(ranked) / (ranked.sum() or 1.0)  # by the brightest pixels, more and more of them
    levels = [float(ranked[np.searchsorted(held, share)]) for share in shares]
    colours = [HUES[index % len(HUES)] for index in range(len(levels))]
    legend = tuple((colour, f"{share:.0%} of the positive part") for colour, share in zip(colours, shares, strict=True))
    lines = tuple(zip(levels, colours, strict=True)) if smoothed.max() > 0 else ()
    return Cell(resize_image(image, smoothed.shape), title, legend=legend, contours=(smoothed, lines))


def targets_cell(
    image: ImageLike, maps: Sequence[MapLike], names: Sequence[str], title: str = "targets", *, shared: bool = True
) -> Cell:
    """Maps of several targets over one image, a hue for each; on one scale, or each on its own."""
    legend = tuple((HUES[index % len(HUES)], name) for index, name in enumerate(names))
    return Cell(blend(image, maps, shared=shared), title, legend=legend)


def _bar(scaled: ScaledMap, colormap: str, unit: str = "") -> ScaleBar:
    return ScaleBar(colormap, scaled.limit, scaled.caption, scaled.signed, unit)
