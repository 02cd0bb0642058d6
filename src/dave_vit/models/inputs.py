"""Models with several inputs, of which one is explained, and the pixel formats of models that write text."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.errors import InputError, ModelError, OptionError
from dave_vit.models.adapter import Preprocessing, traits_of

Arrange = Callable[[Tensor], dict[str, Any]]
"""Converts the explained input to named inputs of the model."""


def with_inputs(model: nn.Module, explained: str | Arrange = "pixel_values", /, **constants: Any) -> WithInputs:
    """Return a model of one input, the explained one; all others are constant.

    Args:
        model: takes its inputs by name; it is unchanged.
        explained: the name of the input to explain; or a function from it to one or more named inputs, for models that
            take images in another format, such as tiles or packed patches.
        constants: the other inputs. Tensors have one row, ``[1, ...]``, which is repeated for all images of a batch
            and their views; other values are passed unchanged.

    Example:
        >>> prompted = dave_vit.with_inputs(model, input_ids=ids, attention_mask=mask, use_cache=False)
        >>> attribution = dave_vit.DAVE(prompted).attribute(pixels, dave_vit.scores.Token(42))
    """
    return WithInputs(model, explained, constants)


class WithInputs(nn.Module):
    """See ``with_inputs``."""

    def __init__(self, model: nn.Module, explained: str | Arrange, constants: dict[str, Any]) -> None:
        super().__init__()
        _check_names(model, [*([explained] if isinstance(explained, str) else []), *constants])
        if explained in constants:
            raise OptionError(f"{explained} is the explained input; leave it out of the constant ones")
        for name, value in constants.items():
            if isinstance(value, Tensor) and value.ndim > 0 and len(value) != 1:
                raise OptionError(
                    f"{name} has {len(value)} rows; give one row, [1, ...], and explain images that need others in "
                    "calls of their own"
                )
        self.model, self.explained, self.constants = model, explained, constants
        self.traits = traits_of(model)
        self.train(model.training)

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's output."""
        others = {name: _expand_constant(value, inputs) for name, value in self.constants.items()}
        own = {self.explained: inputs} if isinstance(self.explained, str) else self.explained(inputs)
        return self.model(**own, **others)


def _expand_constant(value: Any, inputs: Tensor) -> Any:
    """Repeat a constant for each row of the explained input, on its device and in its precision."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(inputs.device, inputs.dtype if value.is_floating_point() else None)
    return value.repeat(len(inputs), *[1] * (value.ndim - 1)) if value.ndim > 0 else value


def _check_names(model: nn.Module, names: list[str]) -> None:
    known = inspect.signature(model.forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    for name in names:
        if name not in known:
            raise OptionError(f"{type(model).__name__} has no input {name!r}; it takes {', '.join(known)}")


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """Embeds text with the features of an image in between: for Idefics 3 and SmolVLM.

    These models drop empty images, so the number of images would depend on the pixels; here there is always one image,
    with the given tiles.

    Attributes:
        model: of transformers.
        input_ids: ``[1, L]``, with one image token per feature of the image.
        tiles: rows and columns of tiles that the image is cut into; the whole image follows them, downscaled. None for
            the whole image alone.
    """

    model: Any
    input_ids: Tensor
    tiles: tuple[int, int] | None = None

    def __call__(self, images: Tensor) -> dict[str, Any]:
        """Return the embeddings ``[B, L, D]`` of text and image."""
        body, patch = self.model.model, self.model.config.vision_config.patch_size
        pieces = images if self.tiles is None else _cut_tiles(images, *self.tiles)  # [B * tiles, C, h, w]
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


def _cut_tiles(images: Tensor, rows: int, columns: int) -> Tensor:
    """Cut ``[B, C, H, W]`` into tiles, row by row, and append the downscaled whole: ``[B * tiles, C, h, w]``."""
    tiles = [tile for row in images.chunk(rows, 2) for tile in row.chunk(columns, 3)]  # [B, C, h, w] each
    whole = nn.functional.interpolate(images, tiles[0].shape[-2:], mode="bicubic", antialias=True, align_corners=False)
    return torch.stack([*tiles, whole], 1).flatten(0, 1)


def join_tiles(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Join tiles ``[tiles, C, h, w]``, row by row, to the image ``[1, C, H, W]``."""
    grid = tiles[: rows * columns].unflatten(0, (rows, columns))  # [rows, columns, C, h, w]
    picture: Tensor = grid.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)  # [C, H, W]
    return picture.unsqueeze(0)


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


def with_embeddings(model: nn.Module, embedding: nn.Module | None = None, /, **constants: Any) -> WithEmbeddings:
    """Return a model of its word embeddings, ``[1, L, D]``; all other inputs are constant.

    Args:
        model: takes ``input_ids`` and other inputs by name; it is unchanged.
        embedding: the module that embeds the words; by default that of transformers.
        constants: all inputs, ``input_ids`` among them.

    Example:
        >>> prompt = with_embeddings(clip, input_ids=ids, pixel_values=pixels)
        >>> weight = effective_transformation(prompt, prompt.embedded, lambda out: out.logits_per_image[:, 0])
        >>> words = (weight * prompt.embedded).sum(-1)  # [1, L]
    """
    half: Any = getattr(model, "text_model", model)
    return WithEmbeddings(model, embedding or half.get_input_embeddings(), constants)


class WithEmbeddings(WithInputs):
    """See ``with_embeddings``.

    Attributes:
        embedded: the embeddings of ``input_ids``, ``[1, L, D]``.
    """

    def __init__(self, model: nn.Module, embedding: nn.Module, constants: dict[str, Any]) -> None:
        if "input_ids" not in constants:
            raise OptionError("the words to explain are missing; give input_ids")
        super().__init__(model, lambda embedded: {}, constants)
        self._embedding = (embedding,)  # in a tuple, so that it is not registered twice
        with torch.no_grad():
            self.embedded: Tensor = embedding(constants["input_ids"])

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's output with these embeddings instead of its own."""
        with _replace_output(self._embedding[0], inputs):
            return super().forward(inputs)


def _replace_output(module: nn.Module, value: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the output of a module is replaced, where it has the shape of this value."""
    return module.register_forward_hook(lambda own, args, output: value if output.shape == value.shape else None)


class ImageAndText(nn.Module):
    """A model of one vector, the pixels of an image and then the embeddings of a text: both are explained together.

    Args:
        model: maps pixels to its output, with a constant text; it is unchanged.
        embedding: the module that embeds the text.
        token_ids: of the text, ``[1, L]``.
        shape: (C, H, W) of the image.
    """

    def __init__(self, model: nn.Module, embedding: nn.Module, token_ids: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self._embedding, self._shape = model, (embedding,), shape  # in a tuple: it is registered already
        with torch.no_grad():
            self.embedded: Tensor = embedding(token_ids)  # [1, L, D]
        self.train(model.training)

    def join(self, images: Tensor) -> Tensor:
        """Return the inputs of images ``[B, C, H, W]``: ``[B, C H W + L D]``."""
        text = self.embedded.to(images).flatten(1).expand(len(images), -1)
        return torch.cat([images.flatten(1), text], 1)

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts ``[..., C, H, W]`` of the image and ``[..., L, D]`` of the text."""
        text_shape = self.embedded.shape[1:]
        pixels, text = values.split([math.prod(self._shape), math.prod(text_shape)], -1)
        return pixels.unflatten(-1, self._shape), text.unflatten(-1, text_shape)

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's output with this image and these embeddings."""
        image, text = self.split(inputs)
        with _replace_output(self._embedding[0], text.to(self.embedded.dtype)):
            return self.model(image)


Format = Literal["plain", "packed", "tiled"]
ImageInputs = dict[str, Any]
"""What an image processor returns for one image."""


def pixel_format(inputs: ImageInputs, spec: str) -> Format:
    """Return the pixel format of a model, found from what its processor returns for an image."""
    shape = tuple(inputs["pixel_values"].shape) if "pixel_values" in inputs else ()  # Pix2Struct has none
    if "image_grid_thw" in inputs and len(shape) == 2:
        return "packed"
    if "rows" in inputs and len(shape) == 5:
        return "tiled"
    if len(shape) == 4 and shape[0] == 1:
        return "plain"
    raise ModelError(
        f"{spec} takes pixels shaped {list(shape)}, which cannot be followed back to the photograph; explain it with "
        "dave_vit.with_inputs and a function of your own that arranges the pixels"
    )


@dataclass(frozen=True)
class PixelInputs:
    """What an image processor made of one photograph.

    Attributes:
        processor: the image processor.
        values: what it returned.
        form: the format of the pixels; tiles are put into the model with the embedded text.
    """

    processor: Any
    values: ImageInputs
    form: Format

    @property
    def image(self) -> Tensor:
        """The image ``[1, C, H, W]`` that is explained."""
        pixels: Tensor = self.values["pixel_values"]
        if self.form == "packed":
            _, rows, columns = self.values["image_grid_thw"][0].tolist()
            return self._packing.unpack(pixels, rows, columns)
        if self.form == "tiled":
            return join_tiles(pixels[0], *self._tiles) if self._tiles else pixels[0, -1:]
        return pixels

    def arrange(self, model: Any, token_ids: Tensor) -> str | Arrange:
        """Return a function from images to the model's inputs, or the name of the input that takes them as they are."""
        if self.form == "tiled":
            return ImageTokens(model, token_ids, self._tiles)
        return self._packing if self.form == "packed" else "pixel_values"

    @property
    def _packing(self) -> PackedPatches:
        processor = self.processor
        return PackedPatches(processor.patch_size, processor.merge_size, processor.temporal_patch_size)

    @property
    def _tiles(self) -> tuple[int, int] | None:
        """Rows and columns of tiles; None where the image is a single tile."""
        rows, columns = int(self.values["rows"][0][0]), int(self.values["cols"][0][0])
        return (rows, columns) if rows else None


def process_image(processor: Any, spec: str, image: Image.Image) -> PixelInputs:
    """Run an image processor, asking for the rows and columns of tiles where it cuts any."""
    options = {"return_row_col_info": True} if hasattr(processor, "do_image_splitting") else {}
    values = dict(processor(images=image, return_tensors="pt", **options))
    return PixelInputs(processor, values, pixel_format(values, spec))


def image_preprocessing(processor: Any, spec: str) -> Preprocessing:
    """Return the preprocessing to one image ``[1, C, H, W]``, of a size that may depend on the photograph."""
    return Preprocessing.of_processor(partial(_to_image, processor, spec), processor)


def _to_image(processor: Any, spec: str, image: Image.Image) -> Tensor:
    return process_image(processor, spec, image).image
