"""open_clip: CLIP and SigLIP models as classifiers of prompts."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit._internal.registry import suggest_names
from dave_vit.errors import ModelError, UnknownName, import_optional
from dave_vit.models.adapter import Adapter, Classes, Preprocessing, Traits, square_side
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.retrieval import SimilarityClassifier, resolve_prompts
from dave_vit.models.state import RANDOM, hub_access, read_weights


def load(
    name: str, weights: str | None = None, classes: Classes | None = None, prompts: Sequence[str] | None = None
) -> Adapter:
    """Load an open_clip model as a classifier of prompts.

    Args:
        name: as open_clip spells it; ``NAME@TAG`` chooses among published weights.
        weights: a local file, "random", or None for the published weights.
        classes: names under which the prompts are shown, or the prompts themselves.
        prompts: one sentence per class.
    """
    spec = f"openclip:{name}"
    sentences, names = resolve_prompts(prompts, classes, spec)
    base, _, tag = name.partition("@")
    known = import_open_clip().list_models()
    if base not in known and not base.startswith("hf-hub:"):
        raise UnknownName(f"open_clip has no model {base!r}{suggest_names(base, known)}")
    model = _download(base, tag) if weights is None else build(base)
    if weights not in (None, RANDOM):
        read_weights(str(weights)).load_into(model)
    with hub_access(f"the tokenizer of {spec}", fix="load it once where there is a network"):
        tokens = import_open_clip().get_tokenizer(base)(sentences)
    return wrap(model, tokens, names, spec=spec)


def wrap(model: nn.Module, tokens: Tensor, names: Sequence[str], *, spec: str) -> Adapter:
    """Return the zero-shot classifier of an open_clip model."""
    clip: Any = model.eval()
    with torch.no_grad():
        text = clip.encode_text(tokens)
    classifier = SimilarityClassifier(clip, encode_image, text, scale=clip.logit_scale.exp(), bias=clip.logit_bias)
    traits = Traits(patch=square_side(getattr(clip.visual, "patch_size", None)), compete=classifier.compete)
    return Adapter(classifier, _preprocessing(clip), names, spec=spec, traits=traits)


def encode_image(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return features ``[B, D]`` of images."""
    return model.encode_image(inputs)  # type: ignore[operator,no-any-return]


def build(name: str, **options: Any) -> nn.Module:
    """Build the architecture, initialised at random unless options say otherwise."""
    with _quiet():
        model: nn.Module = import_open_clip().create_model(name, **options)
    return model


def _download(name: str, tag: str) -> nn.Module:
    tags = import_open_clip().list_pretrained_tags_by_model(name)
    if tag and tag not in tags:
        raise UnknownName(f"open_clip's {name} has no weights {tag!r}; it has {', '.join(tags) or 'none'}")
    if not tags and not name.startswith("hf-hub:"):
        raise ModelError(f"openclip:{name} has no published weights; give a local file with --weights FILE")
    chosen = tag or ("openai" if "openai" in tags else tags[0] if tags else None)
    with hub_access(f"openclip:{name}"):
        try:
            return build(name, pretrained=chosen)
        except RuntimeError as error:  # open_clip raises this for every failed download
            raise OSError(str(error)) from error


def _preprocessing(model: Any) -> Preprocessing:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    config = PreprocessCfg(**model.visual.preprocess_cfg)
    return Preprocessing.of_transform(image_transform_v2(config, is_train=False))


@contextmanager
def _quiet() -> Iterator[None]:
    # open_clip reports on the root logger whatever it does, and warns of weights that are loaded afterwards.
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def import_open_clip() -> Any:
    """Import the library, or raise an error that says how to install it."""
    return import_optional("open_clip", extra="clip")


FAMILIES.register("openclip")(Family(load, "openclip:NAME", "CLIP and SigLIP models of open_clip", extra="clip"))
