"""Adapter of a model: the model itself, its preprocessing, class names and traits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.data.images import check_size, read_image, to_rgb
from dave_vit.errors import InputError, ModelError, offload_error
from dave_vit.neighborhood import Noise

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
        halves = (0.5, 0.5, 0.5)  # of Pix2Struct, which has its own for each picture
        return cls(transform, tuple(processor.image_mean or halves), tuple(processor.image_std or halves))

    @classmethod
    def of_transform(cls, transform: Callable[[Image.Image], Tensor]) -> Preprocessing:
        """Return a transform with the mean and standard deviation of its normalisation, where it has one."""
        steps: Any = transform
        while hasattr(steps, "transforms"):
            steps = steps.transforms
        steps = steps if isinstance(steps, list | tuple) else [steps]
        scaling = next((step for step in steps if hasattr(step, "mean") and hasattr(step, "std")), None)
        return cls(transform, tuple(scaling.mean), tuple(scaling.std)) if scaling else cls(transform)

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

    # Attributes that no forward pass reads: a fingerprint of the model leaves them out.
    UNREAD = frozenset("preprocessing class_names prepare processor image_processor extractor tokenizer".split())

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
        parameter = next(self.parameters())
        if parameter.is_meta:
            raise offload_error()
        return torch.cat([self._preprocess_one(each) for each in images]).to(parameter)

    def _preprocess_one(self, image: ImageLike) -> Tensor:
        """Preprocess one image: ``[1, C, H, W]``."""
        return self.preprocessing(image)

    def forward(self, inputs: Tensor) -> Any:
        """Return logits ``[B, classes]``, or what else the model returns."""
        return self.model(inputs)


# Threshold on the mean sigmoid of the logits: 0.42 to 0.49 in four models trained with softmax, 0.02 in one trained
# with sigmoids.
_SOFTMAX_MEAN = 0.1
PHOTO_MODEL = "timm:deit_tiny_patch16_224"
"""A small, freely downloadable model of photographs."""
_OBJECTS, _COMPARED = 2, 8  # an image shows at most two known objects; logits that are compared


@dataclass(frozen=True)
class Traits:
    """Facts about a model; the defaults hold for a module of which nothing is known.

    Attributes:
        noise: the noise that the model's authors recommend for DAVE, where it is not the default.
        fill: value of neutral grey in the model's input, used by warps to fill uncovered pixels.
        patch: side of the square patches that become tokens, in pixels; None where unknown or not applicable.
        compete: whether classes compete (softmax training) or each logit stands alone (sigmoid training); None where
            unknown.
        domain: the images that the model was trained on, in words, where these are not photographs.
        domain_margin: smallest logit margin of images of that domain; see `top_logit_margin`.
    """

    noise: Noise | None = None
    fill: float = 0.0
    patch: int | None = None
    compete: bool | None = None
    domain: str | None = None
    domain_margin: float | None = None


def traits_of(model: nn.Module) -> Traits:
    """Return the ``traits`` attribute of a model, or the defaults.

    No other attribute is read: what a model's author calls ``fill`` or ``noise`` may mean anything.
    """
    traits = getattr(model, "traits", None)
    return traits if isinstance(traits, Traits) else Traits()


def do_classes_compete(model: nn.Module, logits: Tensor) -> Tensor:
    """Return whether classes compete, for each image of logits ``[B, classes]``.

    Where the model's traits do not say, the logits do: after softmax training only their differences have a meaning,
    and about half are positive; after sigmoid training nearly all are far below zero. A single output has no rivals.
    """
    compete = traits_of(model).compete
    if logits.shape[1] < 2 or compete is not None:
        return torch.full_like(logits[:, 0], bool(compete) and logits.shape[1] > 1, dtype=torch.bool)
    return logits.detach().float().sigmoid().mean(1) > _SOFTMAX_MEAN


def square_side(patch: int | Sequence[int] | None) -> int | None:
    """Return the side of a patch given as an integer or a pair; None where it is not square."""
    if isinstance(patch, int) or patch is None:
        return patch
    return int(patch[0]) if len(set(patch)) == 1 else None


def top_logit_margin(logits: Tensor) -> Tensor:
    """Return the mean of the two largest logits minus the mean of the next six, ``[B, classes]`` -> ``[B]``.

    An image of one or two known objects has one or two large logits; any other has many of similar size.
    """
    largest = logits.topk(min(_COMPARED, logits.shape[-1]), -1).values
    return largest[..., :_OBJECTS].mean(-1) - largest[..., _OBJECTS:].mean(-1)


def is_out_of_domain(model: nn.Module, logits: Tensor) -> Tensor:
    """Return whether each image is out of the model's domain, ``[B]``; always False where the domain is unknown."""
    margin = traits_of(model).domain_margin
    return top_logit_margin(logits) < (float("-inf") if margin is None else margin)


def domain_advice(model: nn.Module, command: str = "") -> str | None:
    """Return the domain of a model that is not for photographs, and the option of `command` that selects one."""
    domain = traits_of(model).domain
    return None if domain is None else f"knows {domain} only; for photographs: {command}--model {PHOTO_MODEL}"


Classes = str | Path | Sequence[str]
"""A file of names (one a line, or JSON), or the names themselves."""


def class_names(count: int, classes: Classes | None = None, *, known: Sequence[str] | None = None) -> list[str]:
    """Return one name for each of ``count`` logits.

    Args:
        count: number of logits.
        classes: names or a file given by the user, if any.
        known: names that came with the model or its weights.
    """
    names = read_classes(classes) if classes is not None else known
    if names is None:
        return imagenet_names() if count == 1000 else [f"class {index}" for index in range(count)]
    if len(names) != count:
        raise ModelError(f"{len(names)} class names for a model of {count} classes; give one name per class, in order")
    return list(names)


def read_classes(classes: Classes) -> list[str]:
    """Read names from a text file (one a line) or a JSON file (a list, or an object from index to name)."""
    if not isinstance(classes, str | Path):
        return [str(name) for name in classes]
    path = Path(classes)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # binary content, or a name that no file can have
        raise ModelError(f"{path}: cannot be read; give a text file with one class name per line, or JSON") from error
    if path.suffix.lower() != ".json":
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        return _from_json(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f'{path}: expected a JSON list of names, or an object such as {{"0": "cat"}}') from error


def _from_json(value: object) -> list[str]:
    if isinstance(value, dict):
        indexed = {int(index): name for index, name in value.items()}
        if sorted(indexed) != list(range(len(indexed))):
            raise ValueError("indices with gaps")
        value = [indexed[index] for index in range(len(indexed))]
    if not isinstance(value, list):
        raise TypeError("no list")
    # torchvision's imagenet_class_index.json holds pairs of synset and name
    return [str(name[-1] if isinstance(name, list) else name) for name in value]


# Classes whose first lemma is that of another class.
_TWINS = {134: "crane (bird)", 517: "crane (machine)", 638: "maillot", 639: "maillot, tank suit"}


def imagenet_names() -> list[str]:
    """Return the thousand class names of ImageNet-1k, short and unique."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    return [_TWINS.get(index, info.index_to_description(index).split(",")[0]) for index in range(1000)]
