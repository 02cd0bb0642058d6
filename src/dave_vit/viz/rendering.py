"""From numbers to colours: scale maps, colour them, and lay them over images and over whole photographs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from dave_vit.data.geometry import Geometry
from dave_vit.errors import InputError, OptionError
from dave_vit.maps import normalize, positive, smooth
from dave_vit.viz.colors import Array, colorize, hue

QUANTILE = 0.99
STRENGTH = 0.95  # opacity of the largest value of a map over an image
View = Literal["map", "signed"]
Scales = Literal["shared", "own"]
_WHOLE = 0.98  # visible share from which on the photograph counts as whole
_MAX_SIDE = 1600  # pixels of what is drawn
_MAPS = ("map", "standard_error", "signed", "certainty")
_WHITE = 0.65  # share of white in the area that was cut off
ImageLike = Image.Image | Tensor | np.ndarray[Any, Any]
MapLike = Tensor | np.ndarray[Any, Any]


@dataclass(frozen=True)
class ScaledMap:
    """A map that is ready for a colormap.

    Attributes:
        values: in [0, 1], or in [-1, 1] where it is signed; [H, W].
        limit: the number that became 1; larger ones are clipped.
        caption: how the limit was computed.
        signed: whether negative values are kept.
    """

    values: Array
    limit: float
    caption: str
    signed: bool = False


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
    caption = f"{quantile * 100:g} % quantile" + (", shared" if len(measured) > 1 else "")
    return ScaledMap(shown.numpy(), limit, caption, signed)


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


def scale_overlays(maps: Sequence[MapLike], *, signed: bool = False, shared: bool = True) -> list[ScaledMap]:
    """Smooth maps [H, W] and scale them, all by one limit or each by its own."""
    smoothed = [smooth_for_overlay(values, signed=signed) for values in maps]
    return [scale_map(values, signed=signed, like=smoothed if shared else None) for values in smoothed]


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
    scaled = scale_overlays([values for values in maps if not isinstance(values, ScaledMap)], shared=shared)
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
    return np.asarray((1 - opacity) * pale + opacity * colours)


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


@dataclass(frozen=True)
class Panel:
    """The map of one target in one image.

    Attributes:
        map: [H, W].
        target: its name, and what else belongs into the title.
        standard_error: of each pixel [H, W], where it is known.
        signed: evidence for and against the target, [H, W]; the map where it is not known.
        certainty: standard errors between each pixel and zero [H, W], where they are known.
        unit: of map and error.
    """

    map: MapLike
    target: str
    standard_error: MapLike | None = None
    signed: MapLike | None = None
    certainty: MapLike | None = None
    unit: str = ""

    def values(self, view: View) -> MapLike:
        """Return the map of a view."""
        return self.map if view == "map" or self.signed is None else self.signed


@dataclass(frozen=True)
class Photo:
    """A photograph with the areas that the model sees.

    Attributes:
        image: the photograph.
        parts: geometry of each input; one, except for tiles.
    """

    image: Image.Image
    parts: tuple[Geometry, ...]

    @cached_property
    def visible_share(self) -> float:
        """Share of the photograph's area that the model sees."""
        width, height = self.image.size
        covered = np.zeros((min(height, 400), min(width, 400)), dtype=bool)
        for left, top, right, bottom in (part.visible_box for part in self.parts):
            down, across = covered.shape[0] / height, covered.shape[1] / width
            covered[round(top * down) : round(bottom * down), round(left * across) : round(right * across)] = True
        return float(covered.mean())

    @property
    def is_plain(self) -> bool:
        """Whether there is one input, in the photograph's own proportions and without margins."""
        (across, down), margins = self.parts[0].scale, max(-self.parts[0].x.offset, -self.parts[0].y.offset)
        return len(self.parts) == 1 and abs(across / down - 1) < 0.02 and margins < 0.02 * max(self.image.size)

    def align(self, colours: Array) -> Array:
        """Put a picture of a plain photograph's only input at its place, on white in the photograph's proportions."""
        (width, height), (across, down) = self.image.size, self.parts[0].scale
        left, top, right, bottom = self.parts[0].visible_box
        margins = [(top / down, (height - bottom) / down), (left / across, (width - right) / across), (0, 0)]
        padding = [[round(side) for side in sides] for sides in margins]
        return np.pad(colours, padding, constant_values=1.0) if self.is_plain else colours

    def resize(self, zoom: float = 1.0) -> "Photo":
        """Return a copy with about `zoom` pixels per pixel of the input, and at most 1600 along its longer side."""
        by = min(max(zoom / min(part.scale) for part in self.parts), _MAX_SIDE / max(self.image.size))
        width, height = (max(1, round(side * by)) for side in self.image.size)
        image = self.image.resize((width, height), Image.Resampling.LANCZOS)
        return Photo(image, tuple(part.resize_photo((width, height)) for part in self.parts))

    def place(self, maps: Sequence[MapLike]) -> Tensor:
        """Merge maps of the inputs into one of the photograph, [H, W]: average where tiles overlap, 0 outside."""
        total = weight = torch.zeros(())
        for part, values in zip(self.parts, maps, strict=True):
            tensor = as_map(values)
            total = total + part.to_photo(tensor)
            weight = weight + part.to_photo(torch.ones_like(tensor))
        return torch.where(weight > 0.5, total / weight.clamp(min=0.5), 0)

    def frame_seen_area(self, colours: ImageLike) -> Array:
        """Draw a frame around the area that the model sees in a picture of the photograph, and fade the rest."""
        array = as_image(colours)
        if self.visible_share >= _WHOLE:
            return array
        size = (array.shape[1], array.shape[0])
        boxes = [[round(side) for side in part.resize_photo(size).visible_box] for part in self.parts]
        pale = _WHITE + (1 - _WHITE) * array
        for left, top, right, bottom in boxes:
            pale[top:bottom, left:right] = array[top:bottom, left:right]
        shown = to_pillow(pale)
        pen, thick = ImageDraw.Draw(shown), max(1, round(min(size) / 200))
        if len(boxes) == 1:
            left, top, right, bottom = boxes[0]
            for out, colour in ((0, "#ffffff"), (thick, "#40175e")):
                pen.rectangle([left - out, top - out, right - 1 + out, bottom - 1 + out], None, colour, thick)
        return as_image(shown)

    def panels(self, groups: Sequence[Sequence[Panel]]) -> list[Panel]:
        """Return one panel per target; several or squashed inputs become one in the photograph's proportions.

        Args:
            groups: for each target the panels of all parts.
        """
        if self.is_plain:
            return [parts[0] for parts in groups]
        small = self.resize()
        return [small._merge_panels(parts) for parts in groups]

    def _merge_panels(self, parts: Sequence[Panel]) -> Panel:
        known = [name for name in _MAPS if getattr(parts[0], name) is not None]
        maps: dict[str, Any] = {name: self.place([getattr(part, name) for part in parts]) for name in known}
        return replace(parts[0], **maps)
