"""Noise of views: kind, level and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dave_vit.errors import OptionError

NoiseKind = Literal["variance_preserving", "additive", "none"]
Schedule = Literal["uniform", "linspace"]


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on a view: x_t = signal(t) x + spread(t) eps.

    Args:
        kind: "variance_preserving": (1-t) x + sqrt(1-(1-t)^2) eps; "additive": x + level eps; "none".
        level: the largest t (at most 1), or the standard deviation of additive noise.
        schedule: t of variance-preserving noise: drawn from U[0, level], or evenly spaced from 0 to level.
    """

    kind: NoiseKind = "variance_preserving"
    level: float = 0.5
    schedule: Schedule = "uniform"

    def __post_init__(self) -> None:
        if self.kind not in get_args(NoiseKind):
            raise OptionError(f"noise kind {self.kind!r}; expected one of {', '.join(get_args(NoiseKind))}")
        if self.schedule not in get_args(Schedule):
            raise OptionError(f"noise schedule {self.schedule!r}; expected one of {', '.join(get_args(Schedule))}")
        top = 1.0 if self.kind == "variance_preserving" else float("inf")
        if not (0 <= self.level <= top and self.level != float("inf")):
            raise OptionError(f"noise level {self.level}; expected a number from 0 to {top} for {self.kind} noise")

    @property
    def is_silent(self) -> bool:
        """Whether views have no noise."""
        return self.kind == "none" or self.level == 0

    def time(self, uniform: float, index: int, count: int) -> float:
        """Return the t of draw ``index`` of ``count``; a single evenly spaced draw is the clean one, t = 0.

        Args:
            uniform: a draw from U[0, 1), used by the uniform schedule.
            index: number of the draw.
            count: how many draws the schedule spans.
        """
        if self.is_silent:
            return 0.0
        if self.kind == "additive":
            return self.level
        if self.schedule == "uniform":
            return self.level * uniform
        return self.level * index / max(count - 1, 1)

    def weights(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return signal and spread at t: [n] each, in t's type."""
        if self.kind == "variance_preserving":
            signal = 1 - t
            return signal, torch.sqrt(t * (2 - t))  # 1 - (1-t)^2 without the cancellation at small t
        return torch.ones_like(t), t
