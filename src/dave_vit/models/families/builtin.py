"""The embedded models: small Vision Transformers trained for the embedded benchmark, weights in the package."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit._internal.registry import Registry
from dave_vit.data.builtin import CLASS_NAMES
from dave_vit.models.adapter import Adapter, Classes, Preprocessing, Traits, class_names
from dave_vit.models.architectures.vits import BcosViT, PlainViT
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.families.bcos import BCOS
from dave_vit.models.state import RANDOM, read_weights

SIZE, PATCH = 224, 16
CAPTIONS = "builtin-captions"
_WORDS = "transformer.wte.weight"  # of the captions' decoder: the embedding of words
_WEIGHTS = Path(__file__).parent.parent / "weights"


@dataclass(frozen=True)
class Architecture:
    """An embedded architecture.

    Attributes:
        create: builds the model, initialised at random.
        encode: converts colours ``[B, 3, H, W]`` in 0..1 to the model's input.
        traits: facts about the model.
        centre: the colour value that becomes zero.
        spread: the colour difference that becomes one.
    """

    create: Callable[[], nn.Module]
    encode: Callable[[Tensor], Tensor]
    traits: Traits
    centre: float = 0.0
    spread: float = 1.0


def _centre(images: Tensor) -> Tensor:
    """Scale colours from 0..1 to -1..1."""
    return images * 2 - 1


def _add_complements(images: Tensor) -> Tensor:
    """Return colours in 0..1 and their complements, ``[B, 6, H, W]``."""
    return torch.cat([images, 1 - images], dim=1)


_DOMAIN = f"{len(CLASS_NAMES)} kinds of emoji"
# `python benchmarks/out_of_domain.py` measures how many images fall below these margins.
_PLAIN = Traits(patch=PATCH, compete=True, domain=_DOMAIN, domain_margin=3.6)
_BCOS = replace(BCOS, patch=PATCH, domain=_DOMAIN, domain_margin=2.6)

BUILTIN: Registry[Architecture] = Registry("embedded model")
BUILTIN.register("builtin")(Architecture(partial(PlainViT, len(CLASS_NAMES), size=SIZE), _centre, _PLAIN, 0.5, 0.5))
BUILTIN.register("builtin-bcos")(Architecture(partial(BcosViT, len(CLASS_NAMES), size=SIZE), _add_complements, _BCOS))


def load(name: str, weights: str | None = None, classes: Classes | None = None) -> Adapter:
    """Load an embedded model: "builtin", "builtin-bcos" or "builtin-captions".

    Args:
        name: of the model.
        weights: a local file for the same architecture, "random", or None for the embedded weights.
        classes: names of the classes, or a file of them.
    """
    if name == CAPTIONS:
        return _load_captioner(weights)
    architecture = BUILTIN[name]
    model = architecture.create()
    if weights != RANDOM:
        read_weights(weights or _WEIGHTS / f"{name}.safetensors").load_into(model)
    mean, std = (architecture.centre,) * 3, (architecture.spread,) * 3
    preprocessing = Preprocessing(partial(_transform, architecture.encode), mean, std)
    names = class_names(len(CLASS_NAMES), classes, known=CLASS_NAMES)
    traits = architecture.traits if weights is None else replace(architecture.traits, domain=None, domain_margin=None)
    return Adapter(model, preprocessing, names, spec=name, traits=traits)


def _load_captioner(weights: str | None) -> Adapter:
    """Load the captioner: the embedded encoder, and a decoder with its own weights."""
    from dave_vit.models.architectures.captioner import build_captioner, build_tokenizer
    from dave_vit.models.checkpoint import import_transformers, quiet
    from dave_vit.models.text_generation import TextGenerator

    transformers, encoder = import_transformers(), read_weights(_WEIGHTS / "builtin.safetensors")
    with quiet():
        model = build_captioner(transformers, encoder.state)
    if weights != RANDOM:
        loaded = read_weights(weights or _WEIGHTS / f"{CAPTIONS}.safetensors")
        head = {"lm_head.weight": loaded.state[_WORDS]} if _WORDS in loaded.state else {}  # the same matrix
        replace(loaded, state={**loaded.state, **head}).load_into(model.decoder)
    traits = Traits(patch=PATCH, domain=_DOMAIN if weights is None else None)
    tokenizer = build_tokenizer(transformers)
    return TextGenerator(model.float(), None, EmbeddedPixels(), tokenizer, spec=CAPTIONS, traits=traits)


@dataclass(frozen=True)
class EmbeddedPixels:
    """The preprocessing of the embedded model in the form of transformers' image processors."""

    do_normalize: bool = True
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, images: Image.Image, return_tensors: str = "pt") -> dict[str, Tensor]:
        """Return the image as ``pixel_values``."""
        return {"pixel_values": _transform(_centre, images)}


def _transform(encode: Callable[[Tensor], Tensor], picture: Image.Image) -> Tensor:
    """Resize the shorter side to 224, crop the centre and encode: ``[1, C, 224, 224]``."""
    scale = SIZE / min(picture.size)
    if scale != 1:
        width, height = (max(SIZE, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (picture.width - SIZE) // 2, (picture.height - SIZE) // 2
    pixels = np.asarray(picture.crop((left, top, left + SIZE, top + SIZE)))
    return encode(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255)


FAMILIES.register("builtin")(Family(load, "builtin", "embedded models: builtin, builtin-bcos, builtin-captions"))
