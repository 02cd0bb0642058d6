"""How models that write text take a picture: as it is, as packed patches, or as tiles; followed both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from dave_vit.errors import ModelError
from dave_vit.models.adapter import Preprocessing
from dave_vit.models.inputs import Arrange, ImageTokens, PackedPatches, joined

Made = dict[str, Any]
"""What a processor makes of a picture."""


@dataclass(frozen=True)
class Form:
    """One way to take a picture.

    Attributes:
        picture: from what the processor makes to one picture ``[1, C, H, W]``, which is explained.
        arrange: from model, what the processor made and numbers of words to a function that makes the model's own
            inputs of pictures; it names the pixels where the model takes them as they are.
        words: whether the numbers of words are among these inputs already.
    """

    picture: Callable[[Any, Made], Tensor]
    arrange: Callable[[Any, Any, Made, Tensor], str | Arrange]
    words: bool = False


def _as_it_is(processor: Any, made: Made) -> Tensor:
    pixels: Tensor = made["pixel_values"]
    return pixels


def _packing(processor: Any) -> PackedPatches:
    return PackedPatches(processor.patch_size, processor.merge_size, processor.temporal_patch_size)


def _unpacked(processor: Any, made: Made) -> Tensor:
    _, rows, columns = made["image_grid_thw"][0].tolist()
    return _packing(processor).unpacked(made["pixel_values"], rows, columns)


def _grid(made: Made) -> tuple[int, int] | None:
    """Rows and columns of tiles; None where the picture is one tile."""
    rows, columns = int(made["rows"][0][0]), int(made["cols"][0][0])
    return (rows, columns) if rows else None


def _untiled(processor: Any, made: Made) -> Tensor:
    tiles, grid = made["pixel_values"][0], _grid(made)
    return tiles[-1:] if grid is None else joined(tiles, *grid)


FORMS = {
    "plain": Form(_as_it_is, lambda model, processor, made, ids: "pixel_values"),
    "packed": Form(_unpacked, lambda model, processor, made, ids: _packing(processor)),
    "tiled": Form(_untiled, lambda model, processor, made, ids: ImageTokens(model, ids, _grid(made)), words=True),
}


def form_of(made: Made, spec: str) -> Form:
    """The way in which a model takes pictures, by what its processor makes of one."""
    shape = tuple(made["pixel_values"].shape)
    if "image_grid_thw" in made and len(shape) == 2:
        return FORMS["packed"]
    if "rows" in made and len(shape) == 5:
        return FORMS["tiled"]
    if len(shape) == 4 and shape[0] == 1:
        return FORMS["plain"]
    raise ModelError(
        f"{spec} takes pixels shaped {list(shape)}, which cannot be followed back to the photograph; explain it with "
        "dave_vit.with_inputs and a function of your own that arranges the pixels"
    )


@dataclass(frozen=True)
class Canvas:
    """The image processor as a transform to one picture."""

    processor: Any
    spec: str

    def made(self, image: Image.Image) -> Made:
        """What the processor makes of a picture, with the rows and columns of tiles where it cuts any."""
        asked = {"return_row_col_info": True} if hasattr(self.processor, "do_image_splitting") else {}
        return dict(self.processor(images=image, return_tensors="pt", **asked))

    def __call__(self, image: Image.Image) -> Tensor:
        """As ``[1, C, H, W]``, of a size that may depend on the picture's."""
        made = self.made(image)
        return form_of(made, self.spec).picture(self.processor, made)


def canvas(processor: Any, spec: str) -> Preprocessing:
    """The preprocessing of a model that writes text."""
    if not getattr(processor, "do_normalize", False):
        return Preprocessing(Canvas(processor, spec))
    return Preprocessing(Canvas(processor, spec), tuple(processor.image_mean), tuple(processor.image_std))
