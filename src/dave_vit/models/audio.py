"""Classifiers of sounds by their spectrograms: a spectrogram is an image of one channel."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dave_vit.errors import ImageError
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
        logits: Tensor = self.model(inputs.squeeze(1).flip(1).transpose(1, 2)).logits
        return logits
