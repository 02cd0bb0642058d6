"""One architecture of the coverage table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from dave_vit.engine.targets import Score

CLASSES = 10


@dataclass(frozen=True)
class Entry:
    """An architecture to check: its own code, made small where its library allows.

    Attributes:
        library: where it comes from.
        family: its name in papers.
        name: its name in the library.
        build: builds the model, initialised by its library.
        size: height and width of the test images.
        channels: of the test images.
        frames: of each clip, for video models.
        score: what is explained, where it is not the predicted class.
    """

    library: str
    family: str
    name: str
    build: Callable[[], nn.Module]
    size: tuple[int, int] = (64, 64)
    channels: int = 3
    frames: int | None = None
    score: Score | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image or clip."""
        return (*([self.frames] if self.frames else []), self.channels, *self.size)
