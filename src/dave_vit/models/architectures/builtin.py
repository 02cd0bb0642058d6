"""The embedded models: small Vision Transformers trained for the embedded benchmark, weights in the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.data.builtin import CLASS_NAMES
from dave_vit.errors import ImageError, ModelError, UnknownName
from dave_vit.models.architectures.bcos_vit import BcosViT
from dave_vit.models.architectures.plain_vit import PlainViT
from dave_vit.registry import nearest

SIZE = 224


def _vit() -> nn.Module:
    return PlainViT(len(CLASS_NAMES), size=SIZE)


def _bcos_vit() -> nn.Module:
    return BcosViT(len(CLASS_NAMES), size=SIZE)


def _centred(images: Tensor) -> Tensor:
    """Colours in 0..1 to -1..1."""
    return images * 2 - 1


def _complemented(images: Tensor) -> Tensor:
    """Colours in 0..1 and their complements, [B, 6, H, W]."""
    return torch.cat([images, 1 - images], dim=1)


@dataclass(frozen=True)
class Architecture:
    """How to make an embedded model, and how colours in 0..1 become its input."""

    create: Callable[[], nn.Module]
    encode: Callable[[Tensor], Tensor]


BUILTIN = {
    "builtin": Architecture(_vit, _centred),
    "builtin-bcos": Architecture(_bcos_vit, _complemented),
}


@dataclass(frozen=True)
class CentreCrop:
    """Turns a picture into the model's input [1, C, 224, 224]: shorter side to 224, centre, encode."""

    encode: Callable[[Tensor], Tensor]

    def __call__(self, image: Image.Image | str | Path) -> Tensor:
        """Preprocess a PIL picture or the file at a path."""
        picture = _open(image) if isinstance(image, str | Path) else image.convert("RGB")
        scale = SIZE / min(picture.size)
        if scale != 1:
            width, height = (max(SIZE, round(side * scale)) for side in picture.size)
            picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        left, top = (picture.width - SIZE) // 2, (picture.height - SIZE) // 2
        pixels = np.asarray(picture.crop((left, top, left + SIZE, top + SIZE)))
        return self.encode(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255)


def _open(path: str | Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise ImageError(f"{path} cannot be read as an image: {error}; give a PNG, JPEG or WebP file") from error


def architecture(name: str) -> Architecture:
    """The architecture of an embedded model."""
    if name not in BUILTIN:
        hint = nearest(name, list(BUILTIN)) or f"; known: {', '.join(BUILTIN)}"
        raise UnknownName(f"unknown embedded model {name!r}{hint}")
    return BUILTIN[name]


def build_builtin(name: str = "builtin") -> nn.Module:
    """An embedded model with its weights, in evaluation mode, with ``.preprocess`` and ``.class_names``."""
    from safetensors.torch import load

    wanted = architecture(name)
    file = resources.files("dave_vit.models") / "weights" / f"{name}.safetensors"
    if not file.is_file():
        raise ModelError(f"the weights {name}.safetensors are not installed; install dave-vit again from its wheel")
    model = wanted.create()
    model.load_state_dict(load(file.read_bytes()))  # float16 in the file; copying makes it float32
    model.preprocess = CentreCrop(wanted.encode)  # type: ignore[assignment]
    model.class_names = list(CLASS_NAMES)  # type: ignore[assignment]
    return model.eval()
