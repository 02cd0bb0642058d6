"""Explain one class of a clip: what the model takes it for, and a map for each frame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from dave_vit.data.images import Clip, LoadedImage, read_clip
from dave_vit.errors import OptionError
from dave_vit.explanations.base import Arrays, draw_strip, overlay_maps, to_array
from dave_vit.explanations.classes import ClassExplanation, classify, refine_classes
from dave_vit.explanations.explainer import Explainer
from dave_vit.models.video import VideoModel
from dave_vit.viz import Drawing, Scales, View, encode_animation

_FRAME_SECONDS = 0.25  # of the animation


@dataclass(frozen=True)
class ClipExplanation(ClassExplanation):
    """The maps of one clip.

    Attributes:
        clip: its frames.
    """

    figure_name: ClassVar[str] = "frames"

    clip: Clip

    def overlays(self, view: View = "map", scales: Scales = "shared") -> list[Image.Image]:
        """Draw each map over its frame."""
        return overlay_maps(self.clip.frames, list(self.viewed_map(view)), view, scales)

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the frame with the largest share of the maps."""
        return self.overlays(view, scales)[int(self._shares().argmax())]

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw all frames side by side, below their numbers."""
        return draw_strip(self.overlays(view, scales), [f"frame {number}" for number in self.clip.numbers], columns=8)

    def _shares(self) -> Tensor:
        """Share of each frame in the positive part of all maps, [T]."""
        sums = self.viewed_map().clamp(min=0).sum((1, 2))
        return sums / sums.sum().clamp(min=1e-30)

    def details(self) -> dict[str, Any]:
        """As of pictures, with the number and the share of each frame."""
        return {**super().details(), "frames": list(self.clip.numbers), "shares": self._shares().tolist()}

    def arrays(self) -> Arrays:
        """Attribution [T, C, H', W'] of the input, and one map per frame of the file [T, H, W]."""
        return {"attribution": to_array(self.explanation.attribution[0]), "map": self.viewed_map().numpy()}

    def files(self, figure_format: str = "png", *, view: View = "map", scales: Scales = "shared") -> dict[str, bytes]:
        """As of pictures, with an animation of all frames instead of one overlay."""
        files = super().files(figure_format, view=view, scales=scales)
        del files["overlay.png"]
        milliseconds = [round(1000 * _FRAME_SECONDS)] * len(self.clip.frames)
        return {**files, "gif": encode_animation(self.overlays(view, scales), milliseconds, "gif")}


def refine_clip(explainer: Explainer, source: str | Path, target: str | None = None) -> Iterator[ClipExplanation]:
    """Yield the explanation of one class of a clip after each chunk of samples.

    Args:
        explainer: holds a video model.
        source: the file; as many of its frames are read as the model takes.
        target: the class, as of pictures; the likeliest one by default.
    """
    model = explainer.model
    if not isinstance(model, VideoModel):
        raise OptionError(f"{model.spec} takes pictures, no clips; choose a video model, or give a picture")
    clip = read_clip(source, model.frames)
    classified = classify(model, LoadedImage(clip.name, clip.frames[0]), model.clip(clip.frames))
    targets = classified.pick(target)
    if len(targets) != 1:
        raise OptionError(f"{len(targets)} classes of a clip; a clip is explained for one at a time")
    for stage in refine_classes(explainer, classified, targets):
        yield ClipExplanation(**vars(stage), clip=clip)
