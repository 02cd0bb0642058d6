"""One architecture of the table of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.targets import Score

CLASSES = 10


@dataclass(frozen=True)
class Entry:
    """An architecture as it is checked: its own code, made small where its library allows.

    Attributes:
        library: where it comes from.
        family: what it is called in papers.
        name: the architecture in its library.
        build: makes the model, initialised by its library.
        size: height and width of the images it is checked with.
        channels: of these images.
        frames: of each clip, for video models.
        score: what is explained, where it is not the predicted class.
        rules: the derivatives in force, where they are not the usual ones.
    """

    library: str
    family: str
    name: str
    build: Callable[[], nn.Module]
    size: tuple[int, int] = (64, 64)
    channels: int = 3
    frames: int | None = None
    score: Score | None = None
    rules: RuleSet | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image, or clip."""
        return (*([self.frames] if self.frames else []), self.channels, *self.size)

    def matches(self, pattern: str) -> bool:
        """Whether library, family or name fits a pattern: a part of it, or with * and ? as in file names."""
        wanted = pattern.lower()
        wanted = wanted if any(sign in wanted for sign in "*?[") else f"*{wanted}*"
        texts = (self.library, self.family, self.name, f"{self.library}:{self.name}")
        return any(fnmatchcase(text.lower(), wanted) for text in texts)
