"""Zero-shot classifiers: the logit of a sentence is its similarity with the image (CLIP, SigLIP)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.engine import gradient
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.errors import OptionError
from dave_vit.models.adapter import Adapter
from dave_vit.models.classes import Classes, read_classes
from dave_vit.models.inputs import WithEmbeddings, with_embeddings

EncodeImage = Callable[[nn.Module, Tensor], Tensor]
"""``encode(model, inputs)`` returns the features ``[B, D]`` of images."""


class SimilarityClassifier(nn.Module):
    """Scaled cosine similarity between an image and each of several prompts.

    Args:
        model: an image and text model.
        encode: its image encoder.
        text: features ``[K, D]`` of the prompts.
        scale: the model's factor on the cosine.
        bias: the model's additive term (SigLIP).

    Attributes:
        compete: whether prompts compete with each other; with a bias, each was trained by itself.
    """

    text: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(
        self, model: nn.Module, encode: EncodeImage, text: Tensor, *, scale: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._encode = encode
        self.compete = bias is None
        self.register_buffer("text", F.normalize(text.detach(), dim=-1))
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("bias", torch.zeros_like(scale) if bias is None else bias.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, K]``."""
        features = F.normalize(self._encode(self.model, inputs), dim=-1)  # [B, D]
        return self.scale * features @ self.text.T + self.bias


class ZeroShotAdapter(Adapter):
    """A zero-shot classifier of transformers, which can also explain the words of its sentences.

    Args:
        args: as of `Adapter`; the model is a `SimilarityClassifier`.
        tokenizer: of the sentences.
        tokens: the tokenized sentences, as the model takes them.
        options: as of `Adapter`.
    """

    def __init__(self, *args: Any, tokenizer: Any, tokens: dict[str, Tensor], **options: Any) -> None:
        super().__init__(*args, **options)
        self.tokenizer, self.tokens = tokenizer, tokens

    def word_model(self, inputs: Tensor, sentence: int = 0) -> WithEmbeddings:
        """Return the model of the word embeddings ``[1, L, D]`` of a sentence, with a fixed image ``[1, C, H, W]``."""
        constants = {name: values[sentence : sentence + 1].to(inputs.device) for name, values in self.tokens.items()}
        model: Any = self.model.model
        return with_embeddings(model, pixel_values=inputs, **constants)

    def word_contributions(self, inputs: Tensor, sentence: int = 0) -> list[tuple[str, float]]:
        """Return each token of a sentence with its part of the similarity; special tokens are left out.

        Args:
            inputs: an image ``[1, C, H, W]``.
            sentence: index of the sentence.
        """
        model = self.word_model(inputs, sentence)
        weight = gradient(model, model.embedded, matched_similarity, rules=EFFECTIVE).weight[:, 0]
        contributions = (weight * model.embedded).sum(-1)[0].tolist()  # [L]
        pairs = zip(self.tokens["input_ids"][sentence].tolist(), contributions, strict=True)
        special = self.tokenizer.all_special_ids
        return [(str(self.tokenizer.decode([token])).strip(), part) for token, part in pairs if token not in special]


def matched_similarity(output: Any) -> Tensor:
    """Return the similarity of each image with the sentence of the same row, ``[B]``."""
    logits: Tensor = output.logits_per_image
    return logits.diagonal()


def resolve_prompts(
    prompts: Sequence[str] | None, classes: Classes | None, spec: str, *, least: int = 2
) -> tuple[list[str], list[str]]:
    """Return the prompts and their names; class names serve as prompts where there are none.

    Args:
        prompts: sentences.
        classes: names of the sentences, or the sentences themselves.
        spec: of the model, for messages.
        least: smallest number of sentences.
    """
    if isinstance(prompts, str):
        raise OptionError(f"prompts is one string, {prompts!r}; give a list of sentences, one for each class")
    sentences = list(prompts) if prompts is not None else read_classes(classes) if classes is not None else []
    if len(sentences) < least:
        raise OptionError(
            f'{spec} compares pictures with sentences; give two or more: prompts=["a cat", "a dog"], or --classes FILE '
            "with one a line"
        )
    names = read_classes(classes) if classes is not None else sentences
    if len(names) != len(sentences):
        raise OptionError(f"{len(names)} class names for {len(sentences)} prompts; give one name a prompt")
    return sentences, names
