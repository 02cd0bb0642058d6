"""Pixel formats of text-generating models: plain, packed patches or tiles; converted to one image and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from dave_vit.errors import ModelError
from dave_vit.models.inputs import Arrange, ImageTokens, PackedPatches, join_tiles

ImageInputs = dict[str, Any]
"""What an image processor returns for one image."""


@dataclass(frozen=True)
class PixelFormat:
    """One format of pixel inputs.

    Attributes:
        to_image: ``to_image(processor, inputs)`` returns the image ``[1, C, H, W]`` that is explained.
        arrange: ``arrange(model, processor, inputs, token_ids)`` returns a function from images to the model's inputs,
            or the name of the pixel input where the model takes images as they are.
        embeds_text: whether these inputs contain the embedded text already.
    """

    to_image: Callable[[Any, ImageInputs], Tensor]
    arrange: Callable[[Any, Any, ImageInputs, Tensor], str | Arrange]
    embeds_text: bool = False


def _packing(processor: Any) -> PackedPatches:
    return PackedPatches(processor.patch_size, processor.merge_size, processor.temporal_patch_size)


def _unpack_image(processor: Any, inputs: ImageInputs) -> Tensor:
    _, rows, columns = inputs["image_grid_thw"][0].tolist()
    return _packing(processor).unpack(inputs["pixel_values"], rows, columns)


def _tile_grid(inputs: ImageInputs) -> tuple[int, int] | None:
    """Return rows and columns of tiles; None where the image is a single tile."""
    rows, columns = int(inputs["rows"][0][0]), int(inputs["cols"][0][0])
    return (rows, columns) if rows else None


def _untile_image(processor: Any, inputs: ImageInputs) -> Tensor:
    tiles, grid = inputs["pixel_values"][0], _tile_grid(inputs)
    return tiles[-1:] if grid is None else join_tiles(tiles, *grid)


_PLAIN = PixelFormat(
    lambda processor, inputs: inputs["pixel_values"], lambda model, processor, inputs, ids: "pixel_values"
)
_PACKED = PixelFormat(_unpack_image, lambda model, processor, inputs, ids: _packing(processor))
_TILED = PixelFormat(
    _untile_image,
    lambda model, processor, inputs, ids: ImageTokens(model, ids, _tile_grid(inputs)),
    embeds_text=True,
)


def pixel_format(inputs: ImageInputs, spec: str) -> PixelFormat:
    """Return the pixel format of a model, found from what its processor returns for an image."""
    shape = tuple(inputs["pixel_values"].shape) if "pixel_values" in inputs else ()  # Pix2Struct has none
    if "image_grid_thw" in inputs and len(shape) == 2:
        return _PACKED
    if "rows" in inputs and len(shape) == 5:
        return _TILED
    if len(shape) == 4 and shape[0] == 1:
        return _PLAIN
    raise ModelError(
        f"{spec} takes pixels shaped {list(shape)}, which cannot be followed back to the photograph; explain it with "
        "dave_vit.with_inputs and a function of your own that arranges the pixels"
    )


@dataclass(frozen=True)
class ImageTransform:
    """An image processor as a transform to one image ``[1, C, H, W]``, of a size that may depend on the photograph."""

    processor: Any
    spec: str

    def process(self, image: Image.Image) -> ImageInputs:
        """Run the processor, asking for the rows and columns of tiles where it cuts any."""
        options = {"return_row_col_info": True} if hasattr(self.processor, "do_image_splitting") else {}
        return dict(self.processor(images=image, return_tensors="pt", **options))

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the image ``[1, C, H, W]``."""
        inputs = self.process(image)
        return pixel_format(inputs, self.spec).to_image(self.processor, inputs)
