"""Retrieval of pages by a query: the late interaction of ColPali and ColQwen2, in total and for each word."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.data.images import to_rgb
from dave_vit.errors import OptionError
from dave_vit.models.adapter import Preprocessing
from dave_vit.models.inputs import Arrange, with_inputs
from dave_vit.models.pixels import ImageTransform, pixel_format
from dave_vit.models.tasks import PromptedModel, TaskKind, TaskModel
from dave_vit.models.text_generation import split_words

_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
MARKS = "(marks)"
"""Name of the part of a score that the prefix and the special tokens of a query have."""


def total_score(output: Tensor) -> Tensor:
    """Return the late-interaction score ``[B]`` of words ``[B, words]``."""
    return output.sum(1)


RETRIEVAL = TaskKind("retrieval", "", total_score, ("total", total_score))


class PageRetriever(PromptedModel):
    """A model that scores pages by a query; `with_prompt` gives it the query.

    Args:
        model: of transformers.
        processor: of its pages and queries.
        spec: the name under which the model was loaded.
        options: as of `Adapter`.
    """

    def __init__(self, model: Any, processor: Any, *, spec: str, **options: Any) -> None:
        self._transform = ImageTransform(processor.image_processor, spec)
        pixels = Preprocessing.of_processor(self._transform, processor.image_processor)
        super().__init__(model, processor, pixels, spec=spec, **options)

    def with_prompt(self, image: Image.Image, prompt: str | None = None) -> TaskModel:
        """Return the model of a page's scores ``[B, words]`` for each word of a query; the last one is of all marks."""
        if not prompt:
            raise OptionError(f'{self.spec} scores pages by a query; give one, --prompt "revenue in 2023"')
        page = to_rgb(image)[0]
        inputs, image_inputs = self.processor(images=[page]), self._transform.process(page)
        form = pixel_format(image_inputs, self.spec)
        arrange = form.arrange(self.model, self.processor.image_processor, image_inputs, inputs["input_ids"])
        explained = arrange if isinstance(arrange, str) else partial(by_page, arrange)
        bound = with_inputs(self.model, explained, **{name: inputs[name] for name in _TEXT if name in inputs})
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
        query = self.model(**{name: tokens[name].to(device) for name in _TEXT if name in tokens}).embeddings[0]
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
