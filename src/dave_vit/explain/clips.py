"""One clip from its frames to files: what the model takes it for, and a map for each frame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from dave_vit._internal.atomic_files import json_bytes, npz_bytes, png_bytes
from dave_vit.data.clips import Clip, read_clip
from dave_vit.data.geometry import Geometry
from dave_vit.data.images import LoadedImage
from dave_vit.errors import OptionError
from dave_vit.explain.classes import ClassExplanation, Explainer, classify
from dave_vit.models.video import VideoModel

_PAUSE = 0.25  # seconds of a frame in the animation


@dataclass(frozen=True)
class ClipExplanation:
    """The maps of one clip.

    Attributes:
        clip: its frames.
        result: of all of them.
        geometry: how a frame of the input lies in a frame of the file.
    """

    clip: Clip
    result: ClassExplanation
    geometry: Geometry

    @property
    def name(self) -> str:
        """What was explained."""
        return self.result.targets[0].name

    @property
    def picture(self) -> LoadedImage:
        """The first frame."""
        return self.result.classified.picture

    @property
    def maps(self) -> Tensor:
        """One for each frame, in the frame of the file: ``[T, H, W]``."""
        return self.geometry.to_photo(self.result.explanation.map[0].detach().float().cpu())

    def overlays(self) -> list[Image.Image]:
        """Each map over its frame, all on one scale."""
        from dave_vit.viz import overlay, scale_map, smooth_for_overlay, to_pillow

        maps = [smooth_for_overlay(frame) for frame in self.maps]
        shown = zip(self.clip.frames, maps, strict=True)
        return [to_pillow(overlay(frame, scale_map(values, like=maps))) for frame, values in shown]

    def strip(self) -> Image.Image:
        """All frames side by side, with their numbers under them."""
        from dave_vit.viz import draw_strip

        return draw_strip(self.overlays(), [f"frame {number}" for number in self.clip.numbers], columns=8)

    def record(self) -> dict[str, Any]:
        """All that is needed to make it again, ready for JSON."""
        shares = self.maps.clamp(min=0).sum((1, 2))
        shares = shares / shares.sum().clamp(min=1e-30)
        return {**self.result.record(), "frames": list(self.clip.numbers), "shares": shares.tolist()}

    def files(self) -> dict[str, bytes]:
        """The contents of the files that keep it, by the ending of their names."""
        from dave_vit.viz import encode_animation

        attribution = self.result.explanation.attribution[0].detach().float().cpu().numpy()
        arrays = {"attribution": attribution, "map": self.maps.numpy()}
        animation = encode_animation(self.overlays(), [round(1000 * _PAUSE)] * len(self.clip.frames), "gif")
        return {
            "json": json_bytes(self.record()),
            "npz": npz_bytes(arrays),
            "frames.png": png_bytes(self.strip()),
            "gif": animation,
        }


def explain_clip(explainer: Explainer, source: str | Path, target: str | None = None) -> ClipExplanation:
    """Explains one class of a clip.

    Args:
        explainer: holds a video model.
        source: the file; of it as many frames are taken as the model takes.
        target: as of images; the likeliest class by default.
    """
    model = explainer.model
    if not isinstance(model, VideoModel):
        raise OptionError(f"{model.spec} takes pictures, no clips; choose a video model, or give a picture")
    clip = read_clip(source, model.frames)
    picture = LoadedImage(clip.name, clip.frames[0])
    classified = classify(model, picture, model.clip(clip.frames))
    targets = classified.pick(target)
    if len(targets) != 1:
        raise OptionError(f"{len(targets)} classes of a clip; a clip is explained for one at a time")
    result = explainer.explain(classified, targets)
    return ClipExplanation(clip, result, Geometry.measure(model.preprocessing, picture.image.size))
