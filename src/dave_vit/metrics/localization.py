"""How much of a map lies where it should: in the cell of a grid, in the boxes or the mask of an object."""

from __future__ import annotations

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.data.grids import cell_bounds
from dave_vit.errors import InputError, OptionError
from dave_vit.metrics.base import METRICS, Case, GridMetric, Metric, Scores


def gridpg(maps: Tensor, cells: int = 2) -> Tensor:
    """The share of positive mass inside the own cell of a grid: [B,K,H,W] -> [B,K].

    Args:
        maps: one map per grid and class; class k belongs to cell k, cells in reading order, K = cells * cells.
        cells: cells along a side.

    Returns:
        Values from 0 to 1; NaN for a map without positive mass, or with a value that is not finite.
    """
    if maps.ndim != 4 or maps.shape[1] != cells * cells or min(maps.shape[2:]) < cells:
        raise InputError(f"grid maps shaped {list(maps.shape)}; expected [B,{cells * cells},H,W] for {cells}x{cells}")
    own = cell_masks(cells, (maps.shape[2], maps.shape[3]), maps.device)  # [K,H,W]
    return _share(maps, own.expand_as(maps))


def energypg(maps: Tensor, regions: Tensor) -> Tensor:
    """The share of positive mass inside the region of the object: [B,H,W] -> [B].

    Args:
        maps: [B,H,W].
        regions: [B,H,W], true inside the boxes or the mask.

    Returns:
        Values from 0 to 1; NaN for a map without positive mass or not finite, and where the region is empty.
    """
    _check_pair(maps, regions)
    shares = _share(maps, regions)
    return torch.where(regions.any(-1).any(-1), shares, torch.nan)


def pointing(maps: Tensor, regions: Tensor) -> Tensor:
    """Whether the highest pixel lies inside the region: [B,H,W] -> [B].

    Returns:
        1 or 0; where several pixels share the maximum, the share of them that lies inside; NaN as in ``energypg``.
    """
    _check_pair(maps, regions)
    top = maps.flatten(1).amax(1)[:, None, None]
    return energypg(((maps == top) & (top > 0)).to(maps.dtype) * _finite(maps)[..., None, None], regions)


def average_precision(maps: Tensor, regions: Tensor) -> Tensor:
    """Precision over recall, averaged, where the pixels of the region are to be found by the map: [B,H,W] -> [B].

    Returns:
        Values from 0 to 1; for a map that knows nothing the region's share of the image. Equal pixels are found
        together. NaN for a map that is not finite, and where the region is empty.
    """
    _check_pair(maps, regions)
    order = maps.flatten(1).sort(1, descending=True)
    inside = regions.flatten(1).gather(1, order.indices).to(precise_dtype(maps.device))  # [B,N]
    count = inside.shape[1]
    falls = torch.ones_like(inside, dtype=torch.bool)
    falls[:, :-1] = order.values[:, 1:] != order.values[:, :-1]
    place = torch.arange(count, device=maps.device).expand_as(falls)
    last = torch.where(falls, place, count).flip(1).cummin(1).values.flip(1)  # the last of the pixels found together
    precision = inside.cumsum(1).gather(1, last) / (last + 1)
    found = (inside * precision).sum(1) / inside.sum(1)
    return torch.where(_finite(maps) & regions.flatten(1).any(1), found, torch.nan)


def cell_masks(cells: int, size: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """[cells * cells, H, W], true inside each cell, in reading order."""
    masks = torch.zeros(cells * cells, *size, dtype=torch.bool, device=device)
    for k, (top, bottom, left, right) in enumerate(cell_bounds(cells, size)):
        masks[k, top:bottom, left:right] = True
    return masks


def _share(maps: Tensor, inside: Tensor) -> Tensor:
    """Positive mass inside over all positive mass, over the last two axes."""
    mass = maps.to(precise_dtype(maps.device)).clamp(min=0)
    total = mass.sum((-2, -1))
    share = (mass * inside).sum((-2, -1)) / total
    return torch.where((total > 0) & _finite(maps), share, torch.nan)


def _finite(maps: Tensor) -> Tensor:
    """Whether every pixel is finite: [...,H,W] -> [...]."""
    return maps.isfinite().all(-1).all(-1)


def _check_pair(maps: Tensor, regions: Tensor) -> None:
    if maps.ndim != 3 or maps.shape != regions.shape or regions.dtype != torch.bool:
        given = f"maps shaped {list(maps.shape)}, regions {regions.dtype} shaped {list(regions.shape)}"
        raise InputError(f"{given}; expected both [B,H,W], the regions of type bool")


@METRICS.register("gridpg")
class GridPG(GridMetric):
    """The grid pointing game: of a grid of images of distinct classes, how much of a class's map lies in its cell."""

    summary = "Share of the positive mass in the cell of the explained class, in grids of images."
    worst = 0.0

    def score(self, case: Case) -> Scores:
        """[B,K], one number per cell."""
        return Scores(gridpg(case.maps, self.options.cells))


class _InRegion(Metric):
    """A metric of the object's region.

    Args:
        largest: the region's share of the crop above which an image is left out; a box that fills the image scores
            full marks for any map.
    """

    worst = 0.0

    def __init__(self, largest: float = 1.0) -> None:
        if not 0 < largest <= 1:
            raise OptionError(f"largest region {largest}; expected a share of the crop above 0, up to 1")
        self.largest = largest

    def reason(self, case: Case, index: int) -> str:
        """Why a map has no score."""
        region = case.regions[index]
        if not region.any():
            return "no box or mask in the crop"
        if self._too_large(region[None]).item():
            return f"region above {self.largest:g} of the crop"
        return super().reason(case, index)

    def _kept(self, values: Tensor, regions: Tensor) -> Scores:
        return Scores(torch.where(self._too_large(regions), torch.nan, values))

    def _too_large(self, regions: Tensor) -> Tensor:
        return regions.double().mean((1, 2)) > self.largest


@METRICS.register("energypg")
class EnergyPG(_InRegion):
    """The energy pointing game: how much of the positive mass lies in the object's boxes or mask."""

    summary = "Share of the positive mass in the boxes or the mask of the object."

    def score(self, case: Case) -> Scores:
        """[B]."""
        return self._kept(energypg(case.maps, case.regions), case.regions)


@METRICS.register("pointing")
class Pointing(_InRegion):
    """The pointing game: whether the highest pixel lies in the object's boxes or mask."""

    summary = "Whether the highest pixel lies in the boxes or the mask of the object."

    def score(self, case: Case) -> Scores:
        """[B]."""
        return self._kept(pointing(case.maps, case.regions), case.regions)


@METRICS.register("average_precision")
class AveragePrecision(_InRegion):
    """Average precision: how well the map's order of the pixels finds the object's boxes or mask."""

    summary = "Average precision of the pixels in the map's order, against the boxes or the mask of the object."
    worst = 0.0

    def score(self, case: Case) -> Scores:
        """[B]."""
        return self._kept(average_precision(case.maps, case.regions), case.regions)
