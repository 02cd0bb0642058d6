"""3-D models of volumes, such as a ViT on CT or MR scans: slices are frames, and maps are drawn slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from dave_vit.errors import ImageError, OptionError, first_line, require_extra
from dave_vit.models.adapter import Adapter, ImageLike, Preprocessing


def standardize(volume: Tensor) -> Tensor:
    """Return a volume with mean 0 and standard deviation 1."""
    return (volume - volume.mean()) / volume.std().clamp(min=1e-12)


class VolumeModel(Adapter):
    """A classifier of volumes, or a segmentation, of which the mean logit of each class is explained.

    Methods take slices as they take the frames of clips: inputs and attributions are ``[B, D, C, H, W]``.

    Args:
        model: maps volumes ``[B, C, D, H, W]`` to logits ``[B, classes]`` or ``[B, classes, D, H, W]``, or to a tuple
            that begins with them.
        size: (D, H, W) of its inputs; a NIfTI file is read as (Z, Y, X) and resized.
        class_names: one name per logit.
        normalize: what is done to the numbers ``[D, H, W]`` of a file.
        channels: number of channels; each has the same volume.
        axes: order in which the model takes the axes of a scan; "xyz" where it was trained with MONAI's loader.
        spec: name of the model.
        options: as of `Adapter`.
    """

    def __init__(
        self,
        model: nn.Module,
        size: tuple[int, int, int],
        class_names: Sequence[str],
        *,
        normalize: Callable[[Tensor], Tensor] = standardize,
        channels: int = 1,
        axes: Literal["zyx", "xyz"] = "zyx",
        spec: str = "volume",
        **options: Any,
    ) -> None:
        if len(size) != 3:
            raise OptionError(f"size {size}; expected depth, height and width")
        super().__init__(model, Preprocessing(self._slice_to_tensor), class_names, spec=spec, **options)
        self.size, self.normalize, self.channels, self.axes = size, normalize, channels, axes

    def _preprocess_one(self, image: ImageLike) -> Tensor:
        """Return a NIfTI file as ``[1, D, C, H, W]``; a picture becomes a volume whose slices are all alike."""
        if not isinstance(image, Image.Image):
            return self.prepare_volume(read_volume(image))
        grey = np.asarray(image.convert("L"), dtype=np.float32)
        return self.prepare_volume(torch.from_numpy(grey).expand(self.size[0], -1, -1))

    def prepare_volume(self, volume: Tensor) -> Tensor:
        """Normalise and resize the numbers ``[D, H, W]`` of a file: ``[1, D, C, H, W]``."""
        resized = F.interpolate(self.normalize(volume.float())[None, None], self.size, mode="trilinear")
        return resized.expand(1, self.channels, *self.size).transpose(1, 2)

    def _slice_to_tensor(self, image: Image.Image) -> Tensor:
        grey = np.asarray(image.convert("L").resize((self.size[2], self.size[1])), dtype=np.float32)
        return torch.from_numpy(grey).expand(self.channels, -1, -1) / 255

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, classes]``."""
        order = (0, 2, 1, 3, 4) if self.axes == "zyx" else (0, 2, 4, 3, 1)
        output: Any = self.model(inputs.permute(order))
        logits: Tensor = output[0] if isinstance(output, list | tuple) else output
        return logits.flatten(2).mean(-1) if logits.ndim > 2 else logits


def import_nibabel() -> Any:
    """Import nibabel, or raise an error that says how to install it."""
    with require_extra("nibabel", "volume"):
        import nibabel
    return nibabel


def load_nifti(path: str | Path) -> Any:
    """Load a NIfTI file of one volume, with its axes in the order left to right, back to front, down to up."""
    nibabel = import_nibabel()
    try:
        file = nibabel.as_closest_canonical(nibabel.load(str(path)))
        file.get_fdata()
    except (OSError, ValueError, EOFError, nibabel.filebasedimages.ImageFileError) as error:
        raise ImageError(f"{path}: not a NIfTI file that can be read ({first_line(error)[:120]})") from error
    if len(file.shape) != 3:
        raise ImageError(f"{path}: {len(file.shape)} axes {file.shape}; expected one volume of three")
    return file


def read_volume(path: str | Path) -> Tensor:
    """Return the numbers of a NIfTI file as ``[Z, Y, X]``: slices from the feet up, rows from the back."""
    return torch.from_numpy(np.ascontiguousarray(load_nifti(path).get_fdata().transpose(2, 1, 0)))
