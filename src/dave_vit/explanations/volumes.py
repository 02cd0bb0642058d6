"""Explain one class of a volume: a map for each slice, a montage, and a NIfTI file of all maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dave_vit.data.images import Clip, LoadedImage
from dave_vit.errors import escape_unprintable
from dave_vit.explanations.base import Arrays, draw_strip, to_array
from dave_vit.explanations.classes import classify, refine_classes
from dave_vit.explanations.clips import ClipExplanation
from dave_vit.explanations.explainer import Explainer
from dave_vit.models.volume import VolumeModel, import_nibabel, load_nifti
from dave_vit.viz import Drawing, Scales, View

_SHOWN = 16  # slices of the montage


@dataclass(frozen=True)
class VolumeExplanation(ClipExplanation):
    """The maps of one volume; its slices are the frames of the clip.

    Attributes:
        file: the NIfTI file, as nibabel loads it.
    """

    figure_name: ClassVar[str] = "slices"

    file: Any

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw a montage of evenly spaced slices, below their numbers."""
        step = -(-len(self.clip.frames) // _SHOWN)
        overlays, numbers = self.overlays(view, scales)[::step], self.clip.numbers[::step]
        return draw_strip(overlays, [f"slice {number}" for number in numbers], columns=4)

    def details(self) -> dict[str, Any]:
        """As of clips; the frames are slices."""
        details = super().details()
        return {**details, "slices": details.pop("frames")}

    def arrays(self) -> Arrays:
        """Attribution [D, C, H, W] of the input, and the map [Z, Y, X] of the file."""
        return {**super().arrays(), "map": to_array(self.volume_map)}

    @property
    def volume_map(self) -> Tensor:
        """The map at the resolution of the file, [Z, Y, X]."""
        maps = self.explanation.map[0].detach().float().cpu()
        return F.interpolate(maps[None, None], self.file.shape[::-1], mode="trilinear")[0, 0]

    def files(self, figure_format: str = "png", *, view: View = "map", scales: Scales = "shared") -> dict[str, bytes]:
        """As of clips, with the map as a NIfTI file in the space of the scan."""
        array = to_array(self.volume_map).transpose(2, 1, 0)
        saved = import_nibabel().Nifti1Image(array, self.file.affine)
        return {**super().files(figure_format, view=view, scales=scales), "nii": saved.to_bytes()}


def refine_volume(explainer: Explainer, source: str, target: str | None = None) -> Iterator[VolumeExplanation]:
    """Yield the explanation of one class of a NIfTI file after each chunk of samples."""
    model, file = explainer.model, load_nifti(source)
    assert isinstance(model, VolumeModel)
    numbers = np.linspace(0, file.shape[2] - 1, model.size[0]).round().astype(int)
    slices = _draw_slices(file.get_fdata()[:, :, numbers])
    clip = Clip(escape_unprintable(Path(source).name.split(".nii")[0]), slices, tuple(numbers.tolist()))
    classified = classify(model, LoadedImage(clip.name, slices[0]), model.preprocess(source))
    for stage in refine_classes(explainer, classified, classified.pick(target)[:1]):
        yield VolumeExplanation(**vars(stage), clip=clip, file=file)


def _draw_slices(values: np.ndarray[Any, Any]) -> tuple[Image.Image, ...]:
    """Draw slices ``[X, Y, D]`` in grey, from the 1st to the 99th percentile of their numbers."""
    low, high = np.percentile(values, (1, 99))
    grey = (255 * ((values - low) / max(high - low, 1e-12)).clip(0, 1)).astype(np.uint8)
    return tuple(Image.fromarray(grey[:, :, number].T).convert("RGB") for number in range(grey.shape[2]))
