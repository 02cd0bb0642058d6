"""Explain classes of clips, sounds and volumes: a map for each frame or slice, or one over the spectrogram."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dave_vit.data.images import Clip, LoadedImage, read_clip
from dave_vit.errors import OptionError, escape_unprintable, import_optional
from dave_vit.explanations.base import Arrays, ImageExplanation, Labelled
from dave_vit.explanations.classes import ClassExplanation, classify, refine_classes
from dave_vit.explanations.explainer import Explainer, Question
from dave_vit.models.recordings import HOP, AudioModel, VideoModel, VolumeModel, load_nifti
from dave_vit.viz.figures import Drawing
from dave_vit.viz.panels import draw_strip
from dave_vit.viz.pictures import encode_animation, overlay_maps
from dave_vit.viz.rendering import Scales, View, as_image, to_pillow

_FRAME_SECONDS = 0.25  # of the animation
_TICKS = (125, 500, 1000, 2000, 4000, 8000)  # Hz
_SHOWN = 16  # slices of the montage


@dataclass(frozen=True)
class ClipExplanation(ClassExplanation):
    """The maps of one clip, or of the slices of one volume.

    Attributes:
        clip: its frames.
        frame_name: what a frame is, "frame" or "slice".
        file: the NIfTI file of a volume, as nibabel loads it; None of clips.
    """

    clip: Clip
    frame_name: str = "frame"
    file: Any = None

    @property
    def figure_name(self) -> str:  # type: ignore[override]
        """Ending of the figure's name."""
        return f"{self.frame_name}s"

    def overlays(self, view: View = "map", scales: Scales = "shared") -> list[Image.Image]:
        """Draw each map over its frame."""
        return overlay_maps(self.clip.frames, list(self.viewed_map(view)), view, scales)

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the frame with the largest share of the maps."""
        return self.overlays(view, scales)[int(self._shares().argmax())]

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw all frames side by side, or a montage of evenly spaced slices, below their numbers."""
        step, columns = (1, 8) if self.file is None else (-(-len(self.clip.frames) // _SHOWN), 4)
        labels = [f"{self.frame_name} {number}" for number in self.clip.numbers]
        return draw_strip(self.overlays(view, scales)[::step], labels[::step], columns=columns)

    def _shares(self) -> Tensor:
        """Share of each frame in the positive part of all maps, [T]."""
        sums = self.viewed_map().clamp(min=0).sum((1, 2))
        return sums / sums.sum().clamp(min=1e-30)

    def details(self) -> dict[str, Any]:
        """As of pictures, with the number and the share of each frame."""
        return {**super().details(), self.figure_name: list(self.clip.numbers), "shares": self._shares().tolist()}

    def arrays(self) -> Arrays:
        """Attribution [T, C, H', W'] of the input, and one map per frame of the file [T, H, W], or that of a volume."""
        arrays = ImageExplanation.arrays(self)
        return arrays if self.file is None else {**arrays, "map": self.volume_map.numpy()}

    @property
    def volume_map(self) -> Tensor:
        """The map of a volume at the resolution of its file, [Z, Y, X]."""
        maps = self.explanation.map[0].detach().float().cpu()
        return F.interpolate(maps[None, None], self.file.shape[::-1], mode="trilinear")[0, 0]

    def files(self, figure_format: str = "png", *, view: View = "map", scales: Scales = "shared") -> dict[str, bytes]:
        """As of pictures, with an animation of all frames instead of one overlay, and the map of a volume as NIfTI."""
        files = super().files(figure_format, view=view, scales=scales)
        del files["overlay.png"]
        milliseconds = [round(1000 * _FRAME_SECONDS)] * len(self.clip.frames)
        files["gif"] = encode_animation(self.overlays(view, scales), milliseconds, "gif")
        if self.file is not None:
            image = import_optional("nibabel", extra="volume").Nifti1Image
            files["nii"] = image(self.volume_map.numpy().transpose(2, 1, 0), self.file.affine).to_bytes()
        return files


def explain_clip(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    """Yield the explanation of one class of a clip; as many of its frames are read as the model takes."""
    model = explainer.model
    assert isinstance(model, VideoModel)
    clip = read_clip(source, model.frames)
    classified = classify(model, LoadedImage(clip.name, clip.frames[0]), model.clip(clip.frames))
    targets = classified.pick(question.target)
    if len(targets) != 1:
        raise OptionError(f"{len(targets)} classes of a clip; a clip is explained for one at a time")
    yield question.target_label, [*refine_classes(explainer, classified, targets, ClipExplanation, clip=clip)]


@dataclass(frozen=True)
class SoundExplanation(ClassExplanation):
    """The map of one sound."""

    figure_name: ClassVar[str] = "spectrogram"

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw the spectrogram, and below it the map over it, by seconds and Hz."""
        figure = Drawing(figsize=(9, 5), layout="constrained")
        pictures = (self.picture.image, self.overlay(view, scales))
        titles = (self.picture.name, f"{self.caption}: {self.method_label}")
        bands, columns = self.inputs.shape[-2:]
        hertz = self._frequencies()
        shown = [tick for tick in _TICKS if hertz[0] <= tick <= hertz[-1]]
        places = [int((hertz - tick).abs().argmin()) + 0.5 for tick in shown]  # bands, counted from the bottom
        for part, picture, title in zip(figure.subplots(2, 1), pictures, titles, strict=True):
            part.imshow(picture.convert("RGB"), aspect="auto", extent=(0, HOP * columns, 0, bands))
            part.set_title(title, fontsize=9)
            part.set_yticks(places, [str(tick) for tick in shown])
            part.set(xlabel="seconds", ylabel="Hz")
        return figure

    def _frequencies(self) -> Tensor:
        assert isinstance(self.explainer.model, AudioModel)
        return self.explainer.model.frequencies()

    def details(self) -> dict[str, Any]:
        """As of pictures, with the seconds of a column and the frequency of each row, from the top."""
        seconds = [round(HOP * column, 3) for column in range(self.inputs.shape[-1])]
        hertz = self._frequencies().flip(0).tolist()
        return {**super().details(), "seconds_of_columns": seconds, "hertz_of_rows": hertz}


def explain_sound(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    """Yield the explanation of classes of a sound."""
    inputs = explainer.model.preprocess(source)
    shown = to_pillow(as_image(explainer.model.preprocessing.picture(inputs)[0]))
    classified = classify(explainer.model, LoadedImage(escape_unprintable(Path(source).stem), shown), inputs)
    targets = classified.pick(question.target)
    yield question.target_label, [*refine_classes(explainer, classified, targets, SoundExplanation)]


def explain_volume(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    """Yield the explanation of one class of a NIfTI file."""
    model, file = explainer.model, load_nifti(source)
    assert isinstance(model, VolumeModel)
    numbers = np.linspace(0, file.shape[2] - 1, model.size[0]).round().astype(int)
    slices = _draw_slices(file.get_fdata()[:, :, numbers])
    clip = Clip(escape_unprintable(Path(source).name.split(".nii")[0]), slices, tuple(numbers.tolist()))
    classified = classify(model, LoadedImage(clip.name, slices[0]), model.preprocess(source))
    targets = classified.pick(question.target)[:1]
    fields = {"clip": clip, "frame_name": "slice", "file": file}
    yield question.target_label, [*refine_classes(explainer, classified, targets, ClipExplanation, **fields)]


def _draw_slices(values: np.ndarray[Any, Any]) -> tuple[Image.Image, ...]:
    """Draw slices ``[X, Y, D]`` in grey, from the 1st to the 99th percentile of their numbers."""
    low, high = np.percentile(values, (1, 99))
    grey = (255 * ((values - low) / max(high - low, 1e-12)).clip(0, 1)).astype(np.uint8)
    return tuple(Image.fromarray(grey[:, :, number].T).convert("RGB") for number in range(grey.shape[2]))
