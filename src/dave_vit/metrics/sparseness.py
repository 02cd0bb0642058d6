"""Complexity and sparseness: how few pixels a map concentrates on. They describe a map and do not test it."""

from __future__ import annotations

import torch
from torch import Tensor

from dave_vit._internal.precision import precise_dtype
from dave_vit.metrics.base import METRICS, Case, Metric, Scores


def complexity(maps: Tensor) -> Tensor:
    """Return the entropy in nats of the magnitudes of maps as shares of their sum: [B,H,W] -> [B].

    Returns:
        0 for a single pixel, to the logarithm of the number of pixels; NaN for a map that is zero or not finite.
    """
    shares = _magnitudes(maps)
    shares = shares / shares.sum(1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(1)


def sparseness(maps: Tensor) -> Tensor:
    """Return the Gini index of the magnitudes of maps: [B,H,W] -> [B].

    Returns:
        0 for equal magnitudes, to 1 - 1 / pixels for a single one; NaN for a map that is zero or not finite.
    """
    ordered = _magnitudes(maps).sort(1).values  # [B,N]
    count = ordered.shape[1]
    weights = 2 * torch.arange(1, count + 1, device=maps.device, dtype=ordered.dtype) - count - 1
    return (ordered * weights).sum(1) / (count * ordered.sum(1))


def _magnitudes(maps: Tensor) -> Tensor:
    """Return [B,pixels], NaN if a value is not finite."""
    flat = maps.flatten(1).to(precise_dtype(maps.device)).abs()
    return torch.where(flat.isfinite().all(1, keepdim=True), flat, torch.nan)


@METRICS.register("complexity")
class Complexity(Metric):
    """Complexity (Bhatt et al., 2020): entropy of the map's magnitudes, in nats."""

    summary = "Entropy of the map's magnitudes: low if a few pixels have all of it."
    higher_is_better = False
    unscored = "map is zero"

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        return Scores(complexity(case.maps))


@METRICS.register("sparseness")
class Sparseness(Metric):
    """Sparseness (Chalasani et al., 2020): Gini index of the map's magnitudes."""

    summary = "Gini index of the map's magnitudes: high if a few pixels have most of it."
    bounds = (0.0, 1.0)
    unscored = "map is zero"

    def score(self, case: Case) -> Scores:
        """Return [B]."""
        return Scores(sparseness(case.maps))
