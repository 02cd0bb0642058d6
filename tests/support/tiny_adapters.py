"""Tiny models with preprocessing and class names, as ``load_model`` would return them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from dave_vit.models import Adapter, Preprocessing
from tiny_models import SIZE, vit

NAMES = ["cat", "tiger cat", "dog", "hen", "cock"]
HALF = (0.5, 0.5, 0.5)


def transform(image: Image.Image) -> torch.Tensor:
    """Resize a picture to the tiny models' input and scale its colours to -1 .. 1, ``[3, H, W]``."""
    pixels = np.asarray(image.resize((SIZE, SIZE)), dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1) * 2 - 1


def adapter(spec: str = "tiny", names: Sequence[str] = NAMES, **shape: int) -> Adapter:
    """Return a tiny ViT with these class names."""
    return Adapter(vit(num_classes=len(names), **shape), Preprocessing(transform, HALF, HALF), list(names), spec=spec)
