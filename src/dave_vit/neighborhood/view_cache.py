"""Cache of draws between batches, since the same seed gives the same views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dave_vit.neighborhood.views import Neighborhood, Views

_CACHE_BYTES = 256 * 2**20  # draws of one neighbourhood up to this size are kept
_BYTES_PER_PIXEL = 24  # beside the noise: coordinates to sample from, for a view and in two steps for the way back


class ViewCache:
    """Views of several neighbourhoods for images of one shape.

    Args:
        levels: the neighbourhoods.
        samples: number of views of each.
        seed: of the draws.
    """

    def __init__(self, levels: Sequence[Neighborhood], samples: int, seed: int) -> None:
        self.levels, self.samples, self.seed = levels, samples, seed
        self._views: dict[tuple[Any, ...], Views] = {}

    def views(self, images: Tensor, level: int, start: int, stop: int) -> Views:
        """Return the draws ``start`` to ``stop`` of a neighbourhood, for images of this form."""
        shape = tuple(images.shape[1:])
        key = (shape, images.device, images.dtype)
        views = self._views.get((level, *key))
        if views is not None:
            return views.part(start, stop)
        bytes_per_view = math.prod(shape) * images.element_size() + math.prod(shape[-2:]) * _BYTES_PER_PIXEL
        is_kept = self.samples * bytes_per_view <= _CACHE_BYTES
        drawn = {"start": 0, "stop": self.samples} if is_kept else {"start": start, "stop": stop}
        views = self.levels[level].views(
            shape, samples=self.samples, seed=self.seed, device=images.device, dtype=images.dtype, **drawn
        )
        if not is_kept:
            return views
        self._views = {known: value for known, value in self._views.items() if known[1:] == key}
        self._views[(level, *key)] = views
        return views.part(start, stop)
