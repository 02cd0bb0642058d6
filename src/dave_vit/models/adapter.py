"""Adapter of a model: the model itself, its preprocessing, class names and traits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.data.images import check_size, read_image, to_rgb
from dave_vit.errors import InputError
from dave_vit.models.traits import Traits

ImageLike = Image.Image | str | Path


@dataclass(frozen=True)
class Preprocessing:
    """Turns an image into the tensor that a model takes.

    Attributes:
        transform: the model library's transform of an RGB image: ``[C, H, W]`` or ``[1, C, H, W]``.
        mean: subtracted from each of the three colours in [0, 1].
        std: divides each of them.
        fit: changes the proportions of the RGB image before the transform; None where it keeps them.
        parts: maps the width and height of a picture to the parts (left, top, right, bottom) that are explained one by
            one; None where the picture is explained as a whole.
    """

    transform: Callable[[Image.Image], Tensor]
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    fit: Callable[[Image.Image], Image.Image] | None = None
    parts: Callable[[tuple[int, int]], list[tuple[int, int, int, int]]] | None = None

    @classmethod
    def of_processor(cls, transform: Callable[[Image.Image], Tensor], processor: Any) -> Preprocessing:
        """Return a transform with the mean and standard deviation of an image processor of transformers."""
        if not getattr(processor, "do_normalize", False):
            return cls(transform)
        return cls(transform, tuple(processor.image_mean), tuple(processor.image_std))

    def __call__(self, image: ImageLike) -> Tensor:
        """Preprocess an image or an image file: ``[1, C, H, W]``."""
        if isinstance(image, Image.Image):
            check_size(image.size, "image")
            picture = to_rgb(image)[0]
        else:
            picture = read_image(image).image
        tensor = self.transform(self.fit(picture) if self.fit is not None else picture)
        return tensor.reshape(1, *tensor.shape[-3:])

    def picture(self, inputs: Tensor) -> Tensor:
        """Undo the normalisation: colours in [0, 1], ``[B, 3, H, W]``."""
        colours = inputs[:, :3].detach().float().cpu()
        mean, std = (torch.tensor(part).view(1, -1, 1, 1) for part in (self.mean, self.std))
        return (colours * std + mean).clamp(0, 1)


class Adapter(nn.Module):
    """A model that maps preprocessed inputs to logits, with its preprocessing, class names and traits.

    Args:
        model: the user's or the library's model; it is unchanged, under ``.model``.
        preprocess: turns an image into an input tensor.
        class_names: one name per logit.
        spec: the name under which the model was loaded.
        traits: facts about the model; the defaults if None.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Preprocessing,
        class_names: Sequence[str],
        *,
        spec: str,
        traits: Traits | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.preprocessing = preprocess
        self.class_names = list(class_names)
        self.spec = spec
        self.traits = traits or Traits()
        self.prepare: Any = None  # a `Prepare` where the user changed the preprocessing
        self.eval()

    @property
    def default_cfg(self) -> dict[str, Any]:
        """The model's configuration, where it has one; that of timm names the architecture."""
        return dict(getattr(self.model, "default_cfg", None) or {})

    def preprocess(self, image: ImageLike | Sequence[ImageLike]) -> Tensor:
        """Preprocess images: ``[B, C, H, W]``, on the model's device.

        Args:
            image: an image, the path of one, or a list of these.
        """
        images = [image] if isinstance(image, Image.Image | str | Path) else list(image)
        if not images:
            raise InputError("no pictures to preprocess; give at least one")
        return torch.cat([self._preprocess_one(each) for each in images]).to(next(self.parameters()))

    def _preprocess_one(self, image: ImageLike) -> Tensor:
        """Preprocess one image: ``[1, C, H, W]``."""
        return self.preprocessing(image)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, classes]``."""
        logits: Tensor = self.model(inputs)
        return logits
