"""Formats in which models that write text take the pixels of images: tiles, packed patches, or as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dave_vit.data.geometry import crop_middle, ramp_images
from dave_vit.errors import InputError, ModelError
from dave_vit.models.adapter import Preprocessing
from dave_vit.models.inputs import Arrange

_ROUNDING = 1e-2  # of normalised colours, in half precision
_HALF = 127.5  # of the largest colour
_BILINEAR = 2  # as PIL counts filters


@dataclass(frozen=True, eq=False)
class TileGrid:
    """Cuts images ``[B, C, H, W]`` into tiles, row by row, with the downscaled whole image before or after them.

    Attributes:
        rows: of tiles.
        columns: of tiles.
        whole: where the whole image comes: "first", "last", or None where there is none.
        lead: shape of the tiles of one image as the model takes them, without ``[C, h, w]``; zeros fill it.
        box: first and last row and column of what the whole image shows; None for all.
        mode: how the whole image is interpolated.
        residual: added to the whole image, which processors make of the photograph, not of the tiles: what its other
            rounding and filters leave.
    """

    rows: int = 1
    columns: int = 1
    whole: str | None = None
    lead: tuple[int, ...] = (1,)
    box: tuple[int, int, int, int] | None = None
    mode: str = "bicubic"
    residual: Tensor | None = None

    def __call__(self, images: Tensor) -> dict[str, Any]:
        """Return ``pixel_values`` as the model takes them."""
        tiles = self.cut(images)
        tiles = F.pad(tiles, (*[0] * 7, math.prod(self.lead) - tiles.shape[1]))
        return {"pixel_values": tiles.reshape(len(images) * self.lead[0], *self.lead[1:], *tiles.shape[2:])}

    def cut(self, images: Tensor) -> Tensor:
        """Return tiles ``[B, tiles, C, h, w]``."""
        height, width = images.shape[-2] // self.rows, images.shape[-1] // self.columns
        grid = images.unflatten(3, (self.columns, width)).unflatten(2, (self.rows, height))
        tiles: Tensor = grid.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # from [B, C, rows, h, columns, w]
        if self.whole is None:
            return tiles
        top, bottom, left, right = self.box or (0, images.shape[-2], 0, images.shape[-1])
        shown = images[..., top:bottom, left:right]
        whole = F.interpolate(shown, (height, width), mode=self.mode, antialias=True, align_corners=False)
        whole = (whole if self.residual is None else whole + self.residual.to(whole)).unsqueeze(1)
        return torch.cat([whole, tiles] if self.whole == "first" else [tiles, whole], 1)

    def join(self, tiles: Tensor) -> Tensor:
        """Return the image ``[1, C, H, W]`` of the tiles ``[tiles, C, h, w]`` of one image."""
        start = int(self.whole == "first")
        grid = tiles[start : start + self.rows * self.columns].unflatten(0, (self.rows, self.columns))
        picture: Tensor = grid.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)  # [C, H, W]
        return picture.unsqueeze(0)

    def is_continuous(self, positions: Tensor) -> bool:
        """Return whether positions in a photograph, ``[tiles, 2, h, w]`` in 0..1 or NaN, go on from tile to tile."""
        joined, (height, width) = self.join(positions)[0], positions.shape[-2:]
        down = joined.diff(dim=1)[:, height - 1 :: height].unflatten(2, (self.columns, width))
        across = joined.diff(dim=2)[..., width - 1 :: width].mT.unflatten(2, (self.rows, height))
        jumps = torch.cat([seam.abs().nan_to_num(-1).amax(-1).flatten() for seam in (down, across)])
        # A photograph crosses all seams, and a tile in a wrong place is at least a whole tile away.
        return bool(((jumps >= 0) & (jumps < 0.5 / (self.rows * self.columns))).all())


@lru_cache(maxsize=64)
def measure_tiles(processor: Any, size: tuple[int, int]) -> TileGrid | None:
    """Return how a processor cuts photographs of a width and height into tiles; None where no grid explains it.

    As `Geometry` does, it measures where each pixel lies, by processing pictures that are black, white, or grey by
    position: in the right order neighbouring tiles show neighbouring pixels.
    """
    shown = [_process(processor, picture)["pixel_values"].float() for picture in ramp_images(size)]
    lead = tuple(shown[0].shape[:-3])
    black, white, *ramps = (tiles.flatten(0, -4) for tiles in shown)  # [tiles, C, h, w]
    contrast = white - black  # 0 where the picture is padded
    positions = torch.stack([((ramp - black) * contrast).sum(1) / (contrast**2).sum(1) for ramp in ramps], 1)
    count = int(contrast.flatten(1).any(1).sum())
    mode = "bilinear" if getattr(processor, "resample", None) == _BILINEAR else "bicubic"
    for whole in (None, "first", "last"):
        tiles = count - (whole is not None)
        for rows in (rows for rows in range(1, tiles + 1) if tiles % rows == 0):
            grid = TileGrid(rows, tiles // rows, whole, lead, mode=mode)
            if grid.is_continuous(positions):
                shows_padding = whole is not None and not contrast[0 if whole == "first" else tiles].all()
                return replace(grid, box=None if shows_padding else _visible_box(grid.join(contrast)[0]))
    return None


def _visible_box(contrast: Tensor) -> tuple[int, int, int, int]:
    """Return the first and last row and column of an image ``[C, H, W]`` that are no padding."""
    rows, columns = (contrast.any(0).any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    return rows[0], rows[-1] + 1, columns[0], columns[-1] + 1


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """Embeds text with the features of images in between: for Idefics 3 and SmolVLM.

    These models drop empty images, so the number of images would depend on the pixels; here there are always as many
    as the prompt has, with the given tiles.

    Attributes:
        model: of transformers.
        input_ids: ``[1, L]``, with one image token per feature of an image.
        tiles: cuts images.
    """

    model: Any
    input_ids: Tensor
    tiles: Arrange = TileGrid()

    def __call__(self, images: Tensor) -> dict[str, Any]:
        """Return the embeddings ``[B, L, D]`` of text and images."""
        body, patch = self.model.model, self.model.config.vision_config.patch_size
        pieces = self.tiles(images)["pixel_values"].flatten(0, -4)  # [B * tiles, C, h, w]
        grid = (len(pieces), pieces.shape[-2] // patch, pieces.shape[-1] // patch)
        seen = torch.ones(grid, dtype=torch.bool, device=images.device)
        vision = body.vision_model(pixel_values=pieces, patch_attention_mask=seen)
        features = body.connector(vision.last_hidden_state)  # [B * tiles, N, D]
        features = features.reshape(len(images), -1, features.shape[-1])
        ids = self.input_ids.to(images.device).repeat(len(images), 1)
        words = self.model.get_input_embeddings()(ids)
        where = (ids == self.model.config.image_token_id).unsqueeze(-1)
        if int(where[0].sum()) != features.shape[1]:
            raise InputError(f"{int(where[0].sum())} image tokens for {features.shape[1]} features; give one for each")
        return {"inputs_embeds": words.masked_scatter(where, features.to(words.dtype))}


@dataclass(frozen=True)
class PackedPatches:
    """Packs images ``[B, C, H, W]`` as Qwen's vision models take them: one row per patch, in groups that are merged.

    Attributes:
        patch: side of a patch in pixels.
        merge: side of a group in patches.
        frames: how often an image is repeated to form a clip.
    """

    patch: int = 14
    merge: int = 2
    frames: int = 2

    def __call__(self, images: Tensor) -> dict[str, Any]:
        """Return patches ``[B * N, C * frames * patch * patch]`` and the grid ``[B, 3]`` of each image."""
        batch, channels, height, width = images.shape
        side = self.patch * self.merge
        if height % side or width % side:
            raise InputError(f"pictures of {height} x {width} pixels; their sides must be multiples of {side}")
        rows, columns = height // side, width // side
        cut = images.reshape(batch, channels, rows, self.merge, self.patch, columns, self.merge, self.patch)
        cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)  # [B, rows, columns, merge, merge, C, 1, patch, patch]
        cut = cut.expand(*[-1] * 6, self.frames, -1, -1)
        grid = torch.tensor([[1, rows * self.merge, columns * self.merge]], device=images.device)
        return {"pixel_values": cut.flatten(0, 4).flatten(1), "image_grid_thw": grid.repeat(batch, 1)}

    def unpack(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Return the image ``[1, C, H, W]`` of patches ``[rows * columns, C * frames * patch * patch]``."""
        groups = (rows // self.merge, columns // self.merge, self.merge, self.merge)
        cut = patches.unflatten(1, (-1, self.frames, self.patch, self.patch))[:, :, 0].unflatten(0, groups)
        placed: Tensor = cut.permute(4, 0, 2, 5, 1, 3, 6)  # [C, rows, merge, patch, columns, merge, patch]
        return placed.flatten(4, 6).flatten(1, 3).unsqueeze(0)


@dataclass(frozen=True)
class PaddedPatches:
    """Cuts images ``[B, C, H, W]`` into a fixed number of patches, row by row, as Gemma 4 takes them.

    Attributes:
        patch: side of a patch in pixels.
        count: number of patches; zeros fill it.
    """

    patch: int
    count: int

    def __call__(self, images: Tensor) -> dict[str, Any]:
        """Return patches ``[B, count, patch * patch * C]`` and the column and row of each, -1 where there is none."""
        patches = F.pixel_unshuffle(images, self.patch)  # [B, C * p * p, rows, columns]
        patches = patches.unflatten(1, (images.shape[1], -1))
        rows, columns = patches.shape[-2:]
        patches = patches.permute(0, 3, 4, 2, 1).flatten(3).flatten(1, 2)
        missing = self.count - rows * columns
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1).to(images.device)
        places = F.pad(places, (0, 0, 0, missing), value=-1).repeat(len(images), 1, 1)
        return {"pixel_values": F.pad(patches, (0, 0, 0, missing)), "image_position_ids": places}

    def unpack(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Return the image ``[1, C, H, W]`` of patches ``[1, count, patch * patch * C]``."""
        grid = patches[0, : rows * columns].unflatten(1, (self.patch**2, -1)).unflatten(0, (rows, columns))
        return F.pixel_shuffle(grid.permute(3, 2, 0, 1).flatten(0, 1).unsqueeze(0), self.patch)


@dataclass(frozen=True)
class PixelInputs:
    """What an image processor made of one photograph, or of several.

    Attributes:
        image: the image ``[1, C, H, W]`` that is explained, or the images ``[1, N, C, H, W]``.
        arrange: a function from images to the model's inputs, or the name of the input that takes them as they are.
        is_embedded: whether tiles are put into the model with the embedded text.
        sizes: width and height of each photograph.
    """

    image: Tensor
    arrange: str | Arrange = "pixel_values"
    is_embedded: bool = False
    sizes: tuple[tuple[int, int], ...] = ()

    def is_equal(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether several images are arranged as in the inputs that a processor made of them together."""
        arranged = self.arrange(self.image)  # type: ignore[operator]
        own = [inputs[name].flatten(0, -4) if self.is_embedded else inputs[name] for name in arranged]
        pairs = [*zip((one.cpu() for one in arranged.values()), own, strict=True)]
        return all(one.shape == two.shape and float((one - two).abs().max()) < _ROUNDING for one, two in pairs)


def process_image(processor: Any, spec: str, image: Image.Image) -> PixelInputs:
    """Run an image processor, and find the format of the pixels from what it returns."""
    if getattr(processor, "is_vqa", False):
        raise ModelError(
            f"{spec} draws its prompt into the picture, whose pixels are then not those of the photograph; take one "
            "that continues a prompt, such as google/pix2struct-textcaps-base"
        )
    values = _process(processor, image)
    if "flattened_patches" in values:
        return _process_document(processor, image)
    pixels: Any = values.get("pixel_values")
    dimensions = 0 if pixels is None else pixels.ndim
    if "image_grid_thw" in values and dimensions == 2:
        packing = PackedPatches(processor.patch_size, processor.merge_size, processor.temporal_patch_size)
        return PixelInputs(packing.unpack(pixels, *values["image_grid_thw"][0, 1:].tolist()), packing)
    if "image_position_ids" in values and dimensions == 3:
        columns, rows = (values["image_position_ids"][0].amax(0) + 1).tolist()
        patches = PaddedPatches(processor.patch_size, pixels.shape[1])
        return PixelInputs(patches.unpack(pixels, rows, columns), patches)
    if dimensions == 4 and len(pixels) == 1:
        return PixelInputs(pixels)
    grid = measure_tiles(processor, image.size) if dimensions > 3 else None
    if grid is None:
        taken = ", ".join(values) if pixels is None else f"pixels shaped {list(pixels.shape)}"
        raise ModelError(
            f"{spec} takes {taken}, which cannot be followed back to the photograph; explain it with "
            "dave_vit.with_inputs and a function of your own that arranges the pixels"
        )
    tiles = pixels.flatten(0, -4).float()
    whole = grid.join(tiles)
    made = grid.cut(whole)[0]
    grid = replace(grid, residual=(tiles[: len(made)] - made)[0 if grid.whole == "first" else -1])
    return PixelInputs(whole, grid, hasattr(processor, "do_image_splitting"))


@dataclass(frozen=True, eq=False)
class ImageRow:
    """Arranges the images ``[B, N, C, H, W]`` of one prompt, each in the middle of a canvas.

    Attributes:
        parts: what an image processor made of each photograph.
    """

    parts: tuple[PixelInputs, ...]

    def __call__(self, images: Tensor) -> dict[str, Any]:
        """Return the inputs of all images of a row after each other; smaller ones are padded with zeros."""
        arranged = []
        for number, part in enumerate(self.parts):
            image = crop_middle(images[:, number], part.image.shape[-2:])
            inputs = {part.arrange: image} if isinstance(part.arrange, str) else part.arrange(image)
            arranged.append({name: one.flatten(0, -4) if part.is_embedded else one for name, one in inputs.items()})
        rows = {name: [one[name].unflatten(0, (len(images), -1)) for one in arranged] for name in arranged[0]}
        return {name: torch.cat(_pad_alike(values), 1).flatten(0, 1) for name, values in rows.items()}


def _pad_alike(values: Sequence[Tensor]) -> list[Tensor]:
    """Pad tensors with zeros to one size of all axes after the first two."""
    size = torch.tensor([value.shape[2:] for value in values]).amax(0)
    missing = [(size - torch.tensor(value.shape[2:])).flip(0).tolist() for value in values]
    return [F.pad(value, [n for more in pads for n in (0, more)]) for value, pads in zip(values, missing, strict=True)]


def join_images(parts: Sequence[PixelInputs], fill: float) -> PixelInputs:
    """Return the images of one prompt beside each other, each in the middle of a canvas that holds the largest.

    Args:
        parts: what an image processor made of each photograph.
        fill: grey around smaller ones, as warps bring in; the model does not get it.
    """
    if len(parts) < 2:
        return parts[0]
    height, width = (max(part.image.shape[axis] for part in parts) for axis in (-2, -1))
    canvas = parts[0].image.new_full((1, len(parts), parts[0].image.shape[1], height, width), fill)
    for number, part in enumerate(parts):
        crop_middle(canvas[:, number], part.image.shape[-2:])[:] = part.image
    sizes = tuple(size for part in parts for size in part.sizes)
    return PixelInputs(canvas, ImageRow(tuple(parts)), parts[0].is_embedded, sizes)


def _process_document(processor: Any, image: Image.Image) -> PixelInputs:
    """Return the pixels of Pix2Struct from -1 to 1; the model gets them with the mean and deviation of a photograph."""
    patches = _process(processor, image, do_normalize=False)["flattened_patches"]
    rows, columns = patches[0, :, :2].amax(0).int().tolist()  # numbered from 1
    side = math.isqrt((patches.shape[2] - 2) // 3)
    colours = torch.from_numpy(np.array(image)).double()
    deviation = max(float(colours.std()), colours.numel() ** -0.5) if processor.do_normalize else 1.0
    mean = float(colours.mean()) if processor.do_normalize else 0.0
    pixels = PaddedPatches(side, 0).unpack(patches[..., 2:], rows, columns) / _HALF - 1
    return PixelInputs(pixels, lambda images: {"pixel_values": (_HALF * images + (_HALF - mean)) / deviation})


def _process(processor: Any, image: Image.Image, **options: Any) -> dict[str, Any]:
    """Return what an image processor returns for one image."""
    return dict(processor(images=image, return_tensors="pt", **options))


def image_preprocessing(processor: Any, spec: str) -> Preprocessing:
    """Return the preprocessing to one image ``[1, C, H, W]``, of a size that may depend on the photograph."""
    return Preprocessing.of_processor(partial(_to_image, processor, spec), processor)


def _to_image(processor: Any, spec: str, image: Image.Image) -> Tensor:
    return process_image(processor, spec, image).image
