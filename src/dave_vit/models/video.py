"""Video classifiers of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dave_vit.models.adapter import Adapter, ImageLike, Preprocessing


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
        logits: Tensor = self.model(inputs).logits
        return logits
