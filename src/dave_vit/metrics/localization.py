"""Localisation: how much of a map lies in the right cell of a grid, or in the boxes or the mask of the object."""

from collections.abc import Callable
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit._internal.schema import Bounds
from dave_vit.data.grids import cell_bounds
from dave_vit.errors import InputError
from dave_vit.metrics.base import METRICS, Case, GridMetric, Metric, Scores


def gridpg(maps: Tensor, cells: int = 2) -> Tensor:
    """Return the share of positive mass inside the class's own cell of a grid: [B,K,H,W] -> [B,K].

    Args:
        maps: one map per grid and class; class k belongs to cell k, cells in reading order, K = cells * cells.
        cells: number of cells along a side.

    Returns:
        Values from 0 to 1; NaN for a map without positive mass, or with a value that is not finite.
    """
    if maps.ndim != 4 or maps.shape[1] != cells * cells or min(maps.shape[2:]) < cells:
        raise InputError(f"grid maps shaped {list(maps.shape)}; expected [B,{cells * cells},H,W] for {cells}x{cells}")
    own = cell_masks(cells, (maps.shape[2], maps.shape[3]), maps.device)  # [K,H,W]
    return _share(maps, own.expand_as(maps))


def energypg(maps: Tensor, regions: Tensor) -> Tensor:
    """Return the share of positive mass inside the region of the object: [B,H,W] -> [B].

    Args:
        maps: [B,H,W].
        regions: [B,H,W], true inside the boxes or the mask.

    Returns:
        Values from 0 to 1; NaN for a map without positive mass or not finite, and where the region is empty.
    """
    _check_pair(maps, regions)
    return torch.where(regions.any(-1).any(-1), _share(maps, regions), torch.nan)


def pointing(maps: Tensor, regions: Tensor) -> Tensor:
    """Return whether the highest pixel lies inside the region: [B,H,W] -> [B].

    Returns:
        1 or 0; if several pixels share the maximum, the share of them that lies inside; NaN as in ``energypg``.
    """
    _check_pair(maps, regions)
    top = maps.flatten(1).amax(1)[:, None, None]
    return energypg(((maps == top) & (top > 0)).to(maps.dtype) * _is_finite(maps)[..., None, None], regions)


def average_precision(maps: Tensor, regions: Tensor) -> Tensor:
    """Return the average precision of retrieving the region's pixels in the order of the map: [B,H,W] -> [B].

    Returns:
        Values from 0 to 1; a constant map scores the region's share of the image. Equal pixels are retrieved together.
        NaN for a map that is not finite, and where the region is empty.
    """
    _check_pair(maps, regions)
    rising, order = maps.flatten(1).nan_to_num().neg().sort(1)
    inside = regions.flatten(1).gather(1, order).to(precise_dtype(maps.device))  # [B,N]
    retrieved = torch.searchsorted(rising, rising, right=True)  # with all equal ones
    precision = inside.cumsum(1).gather(1, retrieved - 1) / retrieved
    average = (inside * precision).sum(1) / inside.sum(1)
    return torch.where(_is_finite(maps) & regions.flatten(1).any(1), average, torch.nan)


def cell_masks(cells: int, size: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """Return masks of the cells in reading order, true inside: [cells * cells, H, W]."""
    masks = torch.zeros(cells * cells, *size, dtype=torch.bool, device=device)
    for k, (top, bottom, left, right) in enumerate(cell_bounds(cells, size)):
        masks[k, top:bottom, left:right] = True
    return masks


def _share(maps: Tensor, inside: Tensor) -> Tensor:
    """Return the positive mass inside over all positive mass, over the last two axes."""
    mass = maps.to(precise_dtype(maps.device)).clamp(min=0)
    total = mass.sum((-2, -1))
    share = (mass * inside).sum((-2, -1)) / total
    return torch.where((total > 0) & _is_finite(maps), share, torch.nan)


def _is_finite(maps: Tensor) -> Tensor:
    """Return whether every pixel is finite: [...,H,W] -> [...]."""
    return maps.isfinite().all(-1).all(-1)


def _check_pair(maps: Tensor, regions: Tensor) -> None:
    if maps.ndim != 3 or maps.shape != regions.shape or regions.dtype != torch.bool:
        shapes = f"maps shaped {list(maps.shape)}, regions {regions.dtype} shaped {list(regions.shape)}"
        raise InputError(f"{shapes}; expected both [B,H,W], the regions of type bool")


@METRICS.register("gridpg")
class GridPG(GridMetric):
    """The grid pointing game: how much of a class's map lies in its cell of a grid of images of distinct classes."""

    summary = "Share of the positive mass in the cell of the explained class, in grids of images."
    bounds = (0.0, 1.0)
    worst = 0.0

    def score(self, case: Case) -> Scores:
        """Return one number per cell, [B,K]."""
        return Scores(gridpg(case.maps, self.options.cells))


class _RegionMetric(Metric):
    """Base of metrics of the object's region.

    Args:
        largest: the region's share of the crop above which an image is left out, since any map scores 1 on a box
            that fills the image.
    """

    bounds = (0.0, 1.0)
    worst = 0.0
    function: ClassVar[Callable[..., Tensor]]
    largest: Annotated[float, Bounds(above=0, at_most=1)] = 1.0

    def reason(self, case: Case, index: int) -> str:
        """Return why a map has no score."""
        region = case.regions[index]
        if not region.any():
            return "no box or mask in the crop"
        if self._is_too_large(region[None]).item():
            return f"region above {self.largest:g} of the crop"
        return super().reason(case, index)

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        values = self.function(case.maps, case.regions)
        return Scores(torch.where(self._is_too_large(case.regions), torch.nan, values))

    def _is_too_large(self, regions: Tensor) -> Tensor:
        return regions.double().mean((1, 2)) > self.largest


@METRICS.register("energypg")
class EnergyPG(_RegionMetric):
    """The energy pointing game: how much of the positive mass lies in the object's boxes or mask."""

    summary = "Share of the positive mass in the boxes or the mask of the object."
    function = staticmethod(energypg)


@METRICS.register("pointing")
class Pointing(_RegionMetric):
    """The pointing game: whether the highest pixel lies in the object's boxes or mask."""

    summary = "Whether the highest pixel lies in the boxes or the mask of the object."
    function = staticmethod(pointing)


@METRICS.register("average_precision")
class AveragePrecision(_RegionMetric):
    """Average precision: how well the map's order retrieves the pixels of the object's boxes or mask."""

    summary = "Average precision of the pixels in the map's order, against the boxes or the mask of the object."
    function = staticmethod(average_precision)
