"""Models with several inputs, of which one is explained."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dave_vit.errors import OptionError
from dave_vit.models.adapter import traits_of

Arrange = Callable[[Tensor], dict[str, Any]]
"""Converts the explained input to named inputs of the model."""


T = TypeVar("T", bound="WithInputs")


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
    return _check_rows(WithInputs(model, explained, constants))


class WithInputs(nn.Module):
    """See ``with_inputs``."""

    def __init__(self, model: nn.Module, explained: str | Arrange, constants: dict[str, Any]) -> None:
        super().__init__()
        _check_names(model, [*([explained] if isinstance(explained, str) else []), *constants])
        if explained in constants:
            raise OptionError(f"{explained} is the explained input; leave it out of the constant ones")
        self.model, self.explained, self.constants = model, explained, constants
        self.traits = traits_of(model)
        self.train(model.training)

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's output."""
        others = {name: _expand_constant(value, inputs) for name, value in self.constants.items()}
        own = {self.explained: inputs} if isinstance(self.explained, str) else self.explained(inputs)
        return self.model(**own, **others)


def _check_rows(bound: T) -> T:
    """Return a model whose constants have one row; raise OptionError for others."""
    for name, value in bound.constants.items():
        if isinstance(value, Tensor) and value.ndim > 0 and len(value) != 1:
            raise OptionError(
                f"{name} has {len(value)} rows; give one row, [1, ...], and explain images that need others in calls "
                "of their own"
            )
    return bound


def _expand_constant(value: Any, inputs: Tensor) -> Any:
    """Repeat a constant, all rows of it, for each row of the explained input, on its device and in its precision."""
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
    return _check_rows(WithEmbeddings(model, embedding or half.get_input_embeddings(), constants))


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
        text = text.to(self.embedded.dtype).clone()  # which models may write into
        with _replace_output(self._embedding[0], text):
            return self.model(image)
