"""From numbers to colours: scale maps, colour them, and lay them over images. Pure functions on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dave_vit.errors import InputError, OptionError
from dave_vit.maps import normalize, positive, smooth
from dave_vit.viz.colors import Array, colorize, hue

QUANTILE = 0.99
STRENGTH = 0.95  # opacity of the largest value of a map over an image
ImageLike = Image.Image | Tensor | np.ndarray[Any, Any]
MapLike = Tensor | np.ndarray[Any, Any]


@dataclass(frozen=True)
class ScaledMap:
    """A map that is ready for a colormap.

    Attributes:
        values: in [0, 1], or in [-1, 1] where it is signed; [H, W].
        limit: the number that became 1; larger ones are clipped.
        quantile: the share of pixels below it.
        signed: whether negative values are kept.
        shared: whether other maps have the same scale.
    """

    values: Array
    limit: float
    quantile: float
    signed: bool = False
    shared: bool = False

    @property
    def caption(self) -> str:
        """How the limit was computed."""
        return f"{self.quantile * 100:g} % quantile" + (", shared" if self.shared else "")


def scale_map(
    values: MapLike, *, quantile: float = QUANTILE, signed: bool = False, like: Sequence[MapLike] | None = None
) -> ScaledMap:
    """Divide a map by one of its high quantiles.

    Args:
        values: a map [H, W].
        quantile: 1 is the maximum; less is robust against single bright pixels.
        signed: keep negative values; otherwise they are clipped to 0.
        like: maps whose largest quantile is used instead of its own, so that maps beside each other can be compared.
    """
    tensor = as_map(values)
    measured = [as_map(each) for each in ([values] if like is None else like)]
    limits = [_limit(each.abs() if signed else each, quantile) for each in measured]
    limit = max(limits) or 1.0  # a map with nothing to show has none
    shown = (tensor / limit).clamp(-1.0 if signed else 0.0, 1.0)
    return ScaledMap(shown.numpy(), limit, quantile, signed, shared=len(measured) > 1)


def _limit(values: Tensor, quantile: float) -> float:
    """Return what `normalize` divides a map by; 0 if nothing is positive."""
    return float(normalize(values[None], quantile)[1]) if bool((values > 0).any()) else 0.0


def colorize_map(values: MapLike | ScaledMap, colormap: str = "dave") -> Array:
    """Return a map in colours, [H, W, 3] in [0, 1]; "dave_signed" is for signed maps."""
    scaled = values if isinstance(values, ScaledMap) else scale_map(values, signed=colormap == "dave_signed")
    return colorize((scaled.values + 1) / 2 if scaled.signed else scaled.values, colormap)


def smooth_for_overlay(values: MapLike, *, signed: bool = False) -> Tensor:
    """Smooth the positive part of a map slightly: over an image, lines of one pixel would be lost.

    Args:
        values: a map [H, W].
        signed: keep the negative part as well.
    """
    tensor = as_map(values) if signed else positive(as_map(values))
    window = max(1, 2 * round((min(tensor.shape) / 45 - 1) / 2) + 1)  # odd; a 45th of the shorter side, 5 pixels of 224
    return smooth(tensor[None], "gaussian", window)[0]


def overlay(
    image: ImageLike, values: MapLike | ScaledMap, *, strength: float = STRENGTH, signed: bool = False
) -> Array:
    """Lay a map over its image, the larger a value, the more opaque: [H, W, 3] in [0, 1].

    Args:
        image: as the model saw it.
        values: its map, which is smoothed first, or a map that is scaled already.
        strength: opacity of the largest value.
        signed: show evidence against the target as well, in orange, and evidence for it in violet.
    """
    if not 0 <= strength <= 1:
        raise OptionError(f"strength {strength}; expected a number from 0 to 1")
    if not isinstance(values, ScaledMap):
        values = scale_map(smooth_for_overlay(values, signed=signed), signed=signed)
    # without the dark ends of the signed colours, which look black over a photograph
    colours = colorize((0.7 * values.values + 1) / 2, "dave_signed") if values.signed else colorize_map(values)
    return _lay_over(image, colours, strength * np.abs(values.values))


def blend(image: ImageLike, maps: Sequence[MapLike | ScaledMap], *, shared: bool = True) -> Array:
    """Lay maps of several targets over one image, each smoothed and in its own hue: [H, W, 3] in [0, 1].

    Args:
        image: as the model saw it.
        maps: its maps, [H, W] each, which are smoothed first; or maps that are scaled already.
        shared: whether all maps have one scale, so that a weak one stays weak.
    """
    smoothed = [smooth_for_overlay(values) for values in maps if not isinstance(values, ScaledMap)]
    scaled = [scale_map(values, like=smoothed if shared else None) for values in smoothed]
    scaled += [values for values in maps if isinstance(values, ScaledMap)]
    levels = np.stack([each.values for each in scaled])  # [K, H, W]
    hues = np.stack([hue(index) for index in range(len(maps))])  # [K, 3]
    colours = hues[levels.argmax(0)]  # only the strongest: a mixed hue would look like another target's
    return _lay_over(image, colours, STRENGTH * levels.max(0))


def _lay_over(image: ImageLike, colours: Array, alpha: Array) -> Array:
    """Lay colours [H, W, 3] with opacity [H, W] over an image, paler and less colourful, so that they stand out."""
    array, opacity = resize_image(image, alpha.shape), alpha[..., None]
    grey = array @ np.array([0.299, 0.587, 0.114])
    pale = 0.15 + 0.75 * (0.35 * array + 0.65 * grey[..., None])
    shown: Array = (1 - opacity) * pale + opacity * colours
    return shown


def as_map(values: MapLike) -> Tensor:
    """Return a map on the CPU in double precision, [H, W]."""
    tensor = torch.as_tensor(values).detach().cpu().double()
    if tensor.ndim != 2:
        raise InputError(f"map shaped {list(tensor.shape)}; expected [H,W]: draw the maps of a batch one by one")
    return tensor


def as_image(image: ImageLike) -> Array:
    """Return an image in any common form as colours in [0, 1], [H, W, 3]."""
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    if isinstance(image, Tensor) and array.ndim == 3:
        array = np.moveaxis(array, 0, -1)  # [C, H, W] -> [H, W, C]
    if array.ndim != 3 or array.shape[-1] != 3:
        raise InputError(f"image shaped {list(image.shape)}; expected a tensor [3,H,W] or an array [H,W,3]")
    return array / 255 if array.dtype == np.uint8 else array.astype(np.float64).clip(0, 1)


def resize_image(image: ImageLike, size: tuple[int, ...]) -> Array:
    """Resize an image to the height and width of a map."""
    array = as_image(image)
    if array.shape[:2] == tuple(size):
        return array
    return as_image(to_pillow(array).resize((size[1], size[0]), Image.Resampling.LANCZOS))


def to_pillow(colours: Array) -> Image.Image:
    """Convert colours in [0, 1] to a Pillow image."""
    return Image.fromarray((colours.clip(0, 1) * 255).round().astype(np.uint8))


def enlarge(colours: Array, side: int = 448) -> Image.Image:
    """Enlarge an image by an integer factor until its shorter side has at least so many pixels."""
    image = to_pillow(colours)
    factor = -(-side // min(image.size))
    size = (image.width * factor, image.height * factor)
    return image.resize(size, Image.Resampling.BICUBIC) if factor > 1 else image
