"""Options of the preprocessing: size, normalisation, and how a photograph is fitted into the input."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dave_vit._internal.schema import Bounds, Positive, check_fields
from dave_vit.data.geometry import Geometry
from dave_vit.errors import OptionError
from dave_vit.models.adapter import Preprocessing

Fit = Literal["crop", "pad", "squash", "tiles"]

_MAX_SIZE = 10_000  # as many pixels as a picture may have that is read
_PROBE = 400  # side of the image with which a preprocessing is measured
_TILE_OVERLAP = 0.1  # of a tile's side, at least, between neighbours


@dataclass(frozen=True)
class Prepare:
    """Options that replace parts of a model's preprocessing.

    Attributes:
        size: side of the square input, in pixels.
        mean: subtracted from each of the three colours in [0, 1].
        std: divides each of them.
        crop: share of the photograph's shorter side that the input shows.
        fit: "crop" to the middle; "pad" with the mean colour, so that nothing is cut off; "squash" the whole into the
            input; "tiles" that overlap and cover the photograph, each explained by itself.

    Example:
        >>> model = load_model("hf:my-model", prepare=Prepare(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)))
    """

    size: Annotated[int, Bounds(at_least=1, at_most=_MAX_SIZE)] | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[Positive, Positive, Positive] | None = None
    crop: Annotated[float, Bounds(above=0, at_most=1)] | None = None
    fit: Fit | None = None

    def __post_init__(self) -> None:
        check_fields(self, "the preprocessing")

    @property
    def complete(self) -> bool:
        """Whether it replaces the model's preprocessing completely."""
        return self.size is not None and self.mean is not None and self.std is not None

    @property
    def flags(self) -> list[str]:
        """The same options on the command line."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        texts = {name: ",".join(map(str, one)) if isinstance(one, tuple) else str(one) for name, one in given.items()}
        return [word for name, text in texts.items() for word in (f"--{name}", text)]

    def of(self, own: Preprocessing) -> Preprocessing:
        """Return the preprocessing to use, where `own` is the model's."""
        base = own if (self.size, self.mean, self.std, self.crop) == (None,) * 4 else self._standard(own)
        if self.fit is None:
            return base
        fit = _PhotoFit(base, "squash" if self.fit == "tiles" else self.fit)
        return replace(base, fit=fit, parts=partial(tiles, fit.aspect) if self.fit == "tiles" else None)

    def _standard(self, own: Preprocessing) -> Preprocessing:
        shown = own.transform(Image.new("RGB", (_PROBE, _PROBE)))
        if shown.shape[-3] != 3:
            raise OptionError(f"this model takes {shown.shape[-3]} channels; its own preprocessing cannot be replaced")
        return self.standard(self.size or int(shown.shape[-1]), self.mean or own.mean, self.std or own.std)

    def standard(self, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Preprocessing:
        """Return the standard preprocessing with this crop."""
        return Preprocessing(Standard(size, mean, std, self.crop or 1.0), mean, std)


@dataclass(frozen=True)
class Standard:
    """The standard transform: resize, crop the centre, subtract the mean, divide by the standard deviation."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0

    def __call__(self, picture: Image.Image) -> Tensor:
        """Transform an image: ``[3, size, size]``."""
        side = min(picture.size) * self.crop
        left, top = ((extent - side) / 2 for extent in picture.size)
        box = (left, top, left + side, top + side)
        shown = picture.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        colours = torch.from_numpy(np.asarray(shown, dtype=np.float32) / 255).permute(2, 0, 1)
        mean, std = (torch.tensor(part, dtype=torch.float32).view(3, 1, 1) for part in (self.mean, self.std))
        return (colours - mean) / std


@dataclass(frozen=True)
class _PhotoFit:
    """Crops, pads or squashes photographs so that a preprocessing then cuts off no part of them."""

    own: Preprocessing
    fit: Literal["crop", "pad", "squash"]

    def __call__(self, picture: Image.Image) -> Image.Image:
        return {"crop": self._crop, "pad": self._pad, "squash": self._squash}[self.fit](picture)

    @cached_property
    def aspect(self) -> float:
        """Width of the input over its height."""
        across, down = self._geometry.input_size
        return across / down

    @cached_property
    def _geometry(self) -> Geometry:
        return Geometry.measure(self.own, (_PROBE, _PROBE))

    def _crop(self, picture: Image.Image) -> Image.Image:
        """Crop the largest centre with the input's proportions; the preprocessing's own crop follows."""
        (across, down), (width, height) = _largest_inside(picture.size, self.aspect), picture.size
        left, top = (width - across) // 2, (height - down) // 2
        return picture.crop((left, top, left + across, top + down))

    def _pad(self, picture: Image.Image) -> Image.Image:
        width, height = picture.size
        size = max(width, math.ceil(height * self.aspect)), max(height, math.ceil(width / self.aspect))
        return self._add_cropped_margin(self._paste_in_centre(picture, size))

    def _squash(self, picture: Image.Image) -> Image.Image:
        longer = max(picture.size)
        size = _largest_inside((longer, longer), self.aspect)
        return self._add_cropped_margin(picture.resize(size, Image.Resampling.BICUBIC))

    def _add_cropped_margin(self, picture: Image.Image) -> Image.Image:
        """Add the margin that the preprocessing cuts off."""
        shares = [self._geometry.input_size[axis] * self._geometry.scale[axis] / _PROBE for axis in (0, 1)]
        across, down = (max(side, round(side / share)) for side, share in zip(picture.size, shares, strict=True))
        return self._paste_in_centre(picture, (across, down))

    def _paste_in_centre(self, picture: Image.Image, size: tuple[int, int]) -> Image.Image:
        red, green, blue = (round(255 * part) for part in self.own.mean)
        canvas = Image.new("RGB", size, (red, green, blue))
        canvas.paste(picture, ((size[0] - picture.width) // 2, (size[1] - picture.height) // 2))
        return canvas


def _largest_inside(size: tuple[int, int], aspect: float) -> tuple[int, int]:
    """Return the largest width and height of these proportions that fit into a size."""
    width, height = size
    return max(1, min(width, round(height * aspect))), max(1, min(height, round(width / aspect)))


def tiles(aspect: float, size: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Return overlapping tiles of the input's proportions that cover a photograph.

    Args:
        aspect: width of the input over its height.
        size: width and height of the photograph.
    """
    width, height = size
    across, down = _largest_inside(size, aspect)
    lefts, tops = _starts(width, across), _starts(height, down)
    return [(left, top, left + across, top + down) for top in tops for left in lefts]


def _starts(extent: int, tile: int) -> list[int]:
    if tile >= extent:
        return [0]
    count = max(2, math.ceil((extent - tile) / (tile * (1 - _TILE_OVERLAP))) + 1)
    return [round(number * (extent - tile) / (count - 1)) for number in range(count)]
