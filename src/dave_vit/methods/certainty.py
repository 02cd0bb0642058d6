"""The explained batch, and the certainty of its maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dave_vit.engine.targets import class_names

TOO_MUCH = 0.25  # share of a map's energy that is sampling error above which users are warned
ENOUGH = 0.1  # share at which `samples="auto"` stops, too


@dataclass(frozen=True, eq=False)
class ExplainedBatch:
    """The images of an explanation, and what figures need of the model; the model itself is not held.

    Attributes:
        inputs: preprocessed images ``[B, C, H, W]``, or clips ``[B, T, C, H, W]``.
        names: of the model's classes, if it has any.
        to_colours: from preprocessed images to colours in [0, 1], if the preprocessing is known.
    """

    inputs: Tensor
    names: Sequence[str] | None = None
    to_colours: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, inputs: Tensor, model: nn.Module) -> ExplainedBatch:
        """Return the batch of inputs of a model."""
        return cls(inputs, class_names(model), getattr(getattr(model, "preprocessing", None), "picture", None))

    @property
    def pictures(self) -> Tensor:
        """Colours in [0, 1], as the model sees them: ``[B, 3, H, W]``; of clips ``[B * T, 3, H, W]``.

        Without known preprocessing, every image is scaled to the range from black to white.
        """
        frames = self.inputs.flatten(0, -4)
        if self.to_colours is not None:
            return self.to_colours(frames)
        shown = frames[:, :3] if frames.shape[1] >= 3 else frames[:, :1].expand(-1, 3, -1, -1)
        low, high = shown.amin((1, 2, 3), keepdim=True), shown.amax((1, 2, 3), keepdim=True)
        return ((shown - low) / (high - low).clamp(min=1e-12)).detach().float().cpu()

    def select(self, images: Tensor) -> ExplainedBatch:
        """Select images by index."""
        return replace(self, inputs=self.inputs[images.to(self.inputs.device)])


def compute_certainty(mean: Tensor, error: Tensor) -> Tensor:
    """Return by how many standard errors each mean differs from zero; 0 where no error is known."""
    return torch.where(error > 0, mean.abs() / error.where(error > 0, 1), 0)


def describe_uncertainty(samples: int, share: float, *, significant: bool) -> str | None:
    """Return a warning for a map that rests on too few samples, or None."""
    if not significant:
        return f"nothing stands out of the noise of {samples} samples: the map is their average, and may be noise alone"
    if samples < 2:
        return "one sample does not show how much of the map is noise; draw more"
    if share <= TOO_MUCH:
        return None
    needed = math.ceil(samples * share / ENOUGH)
    return f"with {samples} samples, {share:.0%} of this map is noise; with {needed} it would be {ENOUGH:.0%}"
