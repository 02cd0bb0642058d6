"""Models of recordings: classifiers of sounds and clips of transformers, and 3-D models of volumes."""

import wave
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.errors import ImageError, OptionError, first_line, import_optional
from dave_vit.models.adapter import Adapter, ImageLike, Preprocessing

HOP = 0.01
"""Seconds between two columns of a spectrogram."""
_LOWEST = 20.0  # Hz, of the lowest band
_SAMPLES = {1: np.uint8, 2: np.int16, 4: np.int32}  # by their width in bytes


def read_sound(path: str | Path, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Read a WAV file with this number of samples a second: one channel in -1..1."""
    fix = f"convert it, ffmpeg -i IN -ar {rate} OUT.wav"
    try:
        with wave.open(str(path), "rb") as file:
            own, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ImageError(f"{path}: not a WAV file that can be read; {fix}") from error
    if own != rate or width not in _SAMPLES or not data:
        given = f"{len(data)} bytes, {own} samples of {8 * width} bits a second"
        raise ImageError(f"{path}: {given}; expected {rate} of 8, 16 or 32 bits: {fix}")
    samples = np.frombuffer(data, _SAMPLES[width]).astype(np.float32).reshape(-1, channels).mean(1)
    scaled: np.ndarray[Any, np.dtype[np.float32]] = samples / 2 ** (8 * width - 1)
    return scaled - 1 if width == 1 else scaled


class AudioModel(Adapter):
    """An Audio Spectrogram Transformer; its inputs are pictures ``[B, 1, bands, columns]``, low bands at the bottom.

    Args:
        model: of transformers.
        extractor: turns sounds into spectrograms.
        class_names: one name per logit.
        options: as of `Adapter`.
    """

    def __init__(self, model: Any, extractor: Any, class_names: Sequence[str], **options: Any) -> None:
        half = (0.5, 0.5, 0.5)  # spectrograms are normalised to about -1..1
        super().__init__(model, Preprocessing(self._from_picture, half, half), class_names, **options)
        self.extractor = extractor

    def _preprocess_one(self, image: ImageLike) -> Tensor:
        """Return the spectrogram ``[1, 1, bands, columns]`` of a WAV file, or of the picture of a spectrogram."""
        if isinstance(image, Image.Image):
            return self.preprocessing(image)
        rate = self.extractor.sampling_rate
        values = self.extractor(read_sound(image, rate), sampling_rate=rate, return_tensors="pt")["input_values"]
        return values.transpose(1, 2).flip(1)[:, None]  # type: ignore[no-any-return]

    def _from_picture(self, image: Image.Image) -> Tensor:
        config: Any = self.model.config
        grey = image.convert("L").resize((config.max_length, config.num_mel_bins))
        return torch.from_numpy(np.asarray(grey, dtype=np.float32))[None] / 127.5 - 1

    def frequencies(self) -> Tensor:
        """Return the middle of each band in Hz, from the lowest ``[bands]``: evenly spaced on the mel scale."""
        ends = 1127 * torch.tensor([_LOWEST, self.extractor.sampling_rate / 2]).div(700).log1p()
        bands = int(self.model.config.num_mel_bins)  # type: ignore[union-attr,arg-type]
        return 700 * (torch.linspace(float(ends[0]), float(ends[1]), bands + 2)[1:-1] / 1127).expm1()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, classes]``."""
        return self.model(inputs.squeeze(1).flip(1).transpose(1, 2)).logits  # type: ignore[no-any-return]


def _process_frame(processor: Any, image: Image.Image) -> Tensor:
    """Preprocess one frame as the processor of clips does."""
    if type(processor).__name__.endswith("VideoProcessor"):  # V-JEPA 2
        pixels: Tensor = processor([[image]], return_tensors="pt")["pixel_values_videos"]
    else:
        pixels = processor([image], return_tensors="pt")["pixel_values"]  # [1, 1, C, H, W]
    return pixels[0, 0]


def _colours(processor: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation for colours in [0, 1]; ViViT scales them to [-1, 1] first."""
    scale = 255 * processor.rescale_factor
    shift = 1.0 if getattr(processor, "offset", False) else 0.0
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
    return tuple((value + shift) / scale for value in mean), tuple(value / scale for value in std)


class VideoModel(Adapter):
    """A classifier of clips ``[B, T, C, H, W]``.

    Args:
        model: of transformers.
        processor: of its clips.
        class_names: one name per logit.
        options: as of `Adapter`.

    Attributes:
        frames: number of frames of a clip.
    """

    frames: int

    def __init__(self, model: Any, processor: Any, class_names: Sequence[str], **options: Any) -> None:
        frame = Preprocessing(partial(_process_frame, processor), *_colours(processor))
        super().__init__(model, frame, class_names, **options)
        self.frames = int(getattr(model.config, "num_frames", None) or model.config.frames_per_clip)  # V-JEPA 2

    def clip(self, frames: Sequence[Image.Image]) -> Tensor:
        """Preprocess each frame by itself, ``[1, T, C, H, W]`` on the model's device."""
        return torch.cat([self.preprocessing(frame) for frame in frames])[None].to(next(self.parameters()))

    def _preprocess_one(self, image: ImageLike) -> Tensor:
        """Return a still picture as a clip in which nothing moves, ``[1, T, C, H, W]``."""
        return self.preprocessing(image).expand(self.frames, -1, -1, -1)[None]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, classes]``."""
        return self.model(inputs).logits  # type: ignore[no-any-return]


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
        resized = nn.functional.interpolate(self.normalize(volume.float())[None, None], self.size, mode="trilinear")
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


def load_nifti(path: str | Path) -> Any:
    """Load a NIfTI file of one volume, with its axes in the order left to right, back to front, down to up."""
    nibabel = import_optional("nibabel", extra="volume")
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
