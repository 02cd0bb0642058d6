"""Similarity of images and text: zero-shot classifiers (CLIP, SigLIP), and retrieval of pages (ColPali, ColQwen2)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from dave_vit.data.images import to_rgb
from dave_vit.engine import EFFECTIVE, gradient
from dave_vit.errors import OptionError
from dave_vit.models.adapter import Adapter, Classes, read_classes
from dave_vit.models.inputs import Arrange, WithEmbeddings, with_embeddings, with_inputs
from dave_vit.models.pixel_formats import process_image
from dave_vit.models.tasks import TEXT_INPUTS, PromptedModel, TaskKind, TaskModel
from dave_vit.models.text_generation import split_words

MARKS = "(marks)"
"""Name of the part of a score that the prefix and the special tokens of a query have."""


def total_score(output: Tensor) -> Tensor:
    """Return the late-interaction score ``[B]`` of words ``[B, words]``."""
    return output.sum(1)


RETRIEVAL = TaskKind("retrieval", "", total_score, ("total", total_score))


class PageRetriever(PromptedModel):
    """A model that scores pages by a query; `with_prompt` gives it the query."""

    def with_prompt(self, image: Image.Image, prompt: str | None = None) -> TaskModel:
        """Return the model of a page's scores ``[B, words]`` for each word of a query; the last one is of all marks."""
        if not prompt:
            raise OptionError(f'{self.spec} scores pages by a query; give one, --prompt "revenue in 2023"')
        page = to_rgb(image)[0]
        inputs = self.processor(images=[page])
        arrange = process_image(self.processor.image_processor, self.spec, page).arrange
        explained = arrange if isinstance(arrange, str) else partial(by_page, arrange)
        bound = with_inputs(self.model, explained, **{name: inputs[name] for name in TEXT_INPUTS if name in inputs})
        query, groups, words = self._embed(prompt)
        return self._wrap(LateInteraction(bound, query, groups), words, RETRIEVAL)

    def with_example_prompt(self, image: Image.Image) -> TaskModel:
        """Return the model with a query of one word."""
        return self.with_prompt(image, "table")

    @torch.no_grad()
    def _embed(self, prompt: str) -> tuple[Tensor, Tensor, list[str]]:
        """Return the embeddings ``[L, D]`` of a query's tokens, the word of each ``[L, words]``, and the words."""
        tokens, tokenizer = self.processor(text=[prompt]), self.processor.tokenizer
        device = next(self.parameters()).device
        query = self.model(**{name: tokens[name].to(device) for name in TEXT_INPUTS if name in tokens}).embeddings[0]
        ids = tokens["input_ids"][0].tolist()
        own = [place for place, token in enumerate(ids) if token not in tokenizer.all_special_ids]
        prefix = tokenizer(self.processor.query_prefix, add_special_tokens=False)["input_ids"]
        words = split_words(tokenizer, [ids[place] for place in own])[len(split_words(tokenizer, prefix)) :]
        groups = torch.zeros(len(ids), len(words) + 1)
        for number, word in enumerate(words):
            groups[[own[piece] for piece in word.pieces], number] = 1
        groups[:, -1] = 1 - groups.sum(1)
        return query, groups.to(query), [*(word.text for word in words), MARKS]


def by_page(arrange: Arrange, images: Tensor) -> dict[str, Any]:
    """Return packed patches page by page, ``[B, N, numbers]``, as ColQwen2 takes them."""
    packed = arrange(images)
    return {**packed, "pixel_values": packed["pixel_values"].unflatten(0, (len(images), -1))}


class LateInteraction(nn.Module):
    """Similarity of each token of a query with that part of a page which is most similar to it, added up by words.

    Args:
        model: maps pages to ``embeddings`` ``[B, N, D]``.
        query: ``[L, D]``.
        groups: the word of each token, ``[L, words]``.
    """

    query: Tensor
    groups: Tensor

    def __init__(self, model: nn.Module, query: Tensor, groups: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("query", query)
        self.register_buffer("groups", groups)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores ``[B, words]``."""
        similarity: Tensor = self.query @ self.model(inputs).embeddings.transpose(1, 2)  # [B, L, N]
        return similarity.amax(-1) @ self.groups


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
            "with one per line"
        )
    names = read_classes(classes) if classes is not None else sentences
    if len(names) != len(sentences):
        raise OptionError(f"{len(names)} class names for {len(sentences)} prompts; give one name per prompt")
    return sentences, names
