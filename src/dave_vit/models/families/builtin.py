"""The embedded models: small Vision Transformers trained for the embedded benchmark, weights in the package."""

from __future__ import annotations

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
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.architectures.bcos_vit import BcosViT
from dave_vit.models.architectures.plain_vit import PlainViT
from dave_vit.models.classes import Classes, class_names
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.families.bcos import BCOS
from dave_vit.models.state import RANDOM, load_state, read_weights
from dave_vit.models.traits import Traits

SIZE, PATCH = 224, 16
CAPTIONS = "builtin-captions"
_WORDS = "transformer.wte.weight"  # of the captions' decoder: the embedding of words
_WEIGHTS = Path(__file__).parent.parent / "weights"


@dataclass(frozen=True)
class Architecture:
    """An embedded architecture.

    Attributes:
        create: makes the model, initialised at random.
        encode: colours ``[B, 3, H, W]`` in 0..1 to the model's input.
        centre: the value of each colour that becomes zero.
        spread: the difference to it that becomes one.
        traits: what else is known of the model.
    """

    create: Callable[[], nn.Module]
    encode: Callable[[Tensor], Tensor]
    centre: float
    spread: float
    traits: Traits


def _centred(images: Tensor) -> Tensor:
    """Colours in 0..1 to -1..1."""
    return images * 2 - 1


def _complemented(images: Tensor) -> Tensor:
    """Colours in 0..1 and their complements, [B, 6, H, W]."""
    return torch.cat([images, 1 - images], dim=1)


_DOMAIN = f"{len(CLASS_NAMES)} kinds of emoji"
# `python benchmarks/out_of_domain.py` shows how many pictures fall below.
_PLAIN = Traits(patch=PATCH, compete=True, domain=_DOMAIN, domain_margin=3.6)
_BCOS = replace(BCOS, patch=PATCH, domain=_DOMAIN, domain_margin=2.6)

BUILTIN: Registry[Architecture] = Registry("embedded model")
BUILTIN.register("builtin")(Architecture(partial(PlainViT, len(CLASS_NAMES), size=SIZE), _centred, 0.5, 0.5, _PLAIN))
BUILTIN.register("builtin-bcos")(
    Architecture(partial(BcosViT, len(CLASS_NAMES), size=SIZE), _complemented, 0.0, 1.0, _BCOS)
)


def load(name: str, weights: str | None = None, classes: Classes | None = None) -> Adapter:
    """An embedded model: "builtin", "builtin-bcos" or "builtin-captions".

    Args:
        name: of the model.
        weights: a local file for the same architecture, "random", or None for the embedded weights.
        classes: names of the classes, or a file of them.
    """
    if name == CAPTIONS:
        return _captioner(weights)
    made = BUILTIN[name]
    model = made.create()
    if weights != RANDOM:
        load_state(model, read_weights(weights or _WEIGHTS / f"{name}.safetensors"))
    preprocessing = Preprocessing(partial(_transformed, made.encode), (made.centre,) * 3, (made.spread,) * 3)
    names = class_names(len(CLASS_NAMES), classes, known=CLASS_NAMES)
    traits = made.traits if weights is None else replace(made.traits, domain=None, domain_margin=None)
    return Adapter(model, preprocessing, names, spec=name, traits=traits)


def _captioner(weights: str | None) -> Adapter:
    """The model that names objects in words: the embedded encoder, and a decoder with weights of its own."""
    from dave_vit.models.architectures.captioner import captioner, tokenizer
    from dave_vit.models.families.hf import package, quiet
    from dave_vit.models.text_generation import TextGenerator

    transformers, encoder = package(), read_weights(_WEIGHTS / "builtin.safetensors")
    with quiet():
        model = captioner(transformers, encoder.state)
    if weights != RANDOM:
        given = read_weights(weights or _WEIGHTS / f"{CAPTIONS}.safetensors")
        head = {"lm_head.weight": given.state[_WORDS]} if _WORDS in given.state else {}  # the same matrix
        load_state(model.decoder, replace(given, state={**given.state, **head}))
    traits = Traits(patch=PATCH, domain=_DOMAIN if weights is None else None)
    return TextGenerator(model.float(), None, EmbeddedPixels(), tokenizer(transformers), spec=CAPTIONS, traits=traits)


@dataclass(frozen=True)
class EmbeddedPixels:
    """The preprocessing of the embedded model in the form of transformers' image processors."""

    do_normalize: bool = True
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, images: Image.Image, return_tensors: str = "pt") -> dict[str, Tensor]:
        """The one picture as ``pixel_values``."""
        return {"pixel_values": _transformed(_centred, images)}


def _transformed(encode: Callable[[Tensor], Tensor], picture: Image.Image) -> Tensor:
    """A picture as the model's input [1, C, 224, 224]: shorter side to 224, centre, encode."""
    scale = SIZE / min(picture.size)
    if scale != 1:
        width, height = (max(SIZE, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (picture.width - SIZE) // 2, (picture.height - SIZE) // 2
    pixels = np.asarray(picture.crop((left, top, left + SIZE, top + SIZE)))
    return encode(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255)


FAMILIES.register("builtin")(Family(load, "builtin", "embedded models: builtin, builtin-bcos, builtin-captions"))
