"""Explain the words that a model writes about a photograph, each with a map of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from dave_vit.data.images import LoadedImage
from dave_vit.errors import OptionError
from dave_vit.explain.base import draw_strip, overlay_maps
from dave_vit.explain.explainer import Explainer
from dave_vit.explain.scores import JointExplanation, ScoreExplanation, refine_score, shared_fields
from dave_vit.models.text_generation import MAX_TOKENS, AnsweredPrompt, TextGenerator
from dave_vit.viz import Drawing, Scales, View


@dataclass(frozen=True)
class WordExplanation(JointExplanation):
    """An answer with the maps of some of its words.

    Attributes:
        answered: the model with its prompt and its answer.
        prompt: the question; None for captioners.
        numbers: the explained words, counted from 1.
    """

    figure_name: ClassVar[str] = "words"

    answered: AnsweredPrompt
    prompt: str | None
    numbers: tuple[int, ...]

    @property
    def name(self) -> str:
        """The numbers of the explained words."""
        return f"words:{','.join(map(str, self.numbers))}"

    @property
    def words(self) -> list[str]:
        """The words of the whole answer."""
        return [word.text for word in self.answered.words]

    @property
    def caption(self) -> str:
        """The answer."""
        return self.answered.answer

    @property
    def summary(self) -> list[str]:
        """The answer."""
        return [f"  {self.answered.answer}"]

    @property
    def _explained_words(self) -> list[str]:
        return [self.words[number - 1] for number in self.numbers]

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the sum of the maps over the photograph: the map of all explained words together."""
        total = torch.stack(self._viewed_maps(view)).sum(0)
        return overlay_maps([self.picture.image], [total], view, scales)[0]

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw one overlay per explained word, below the word."""
        overlays = overlay_maps([self.picture.image] * len(self.parts), self._viewed_maps(view), view, scales)
        return draw_strip(overlays, self._explained_words, columns=6)

    def _viewed_maps(self, view: View) -> list[Tensor]:
        return [part.viewed_map(view) for part in self.parts]

    def details(self) -> dict[str, Any]:
        """The prompt, the answer, and the value of each explained word."""
        explained = [
            {"word": number, "text": text, "value": part.value, "seconds": round(part.seconds, 3)}
            for number, text, part in zip(self.numbers, self._explained_words, self.parts, strict=True)
        ]
        answer = {"prompt": self.prompt, "answer": self.answered.answer, "words": self.words}
        return {**answer, "explained": explained, "tokens": list(self.answered.tokens)}

    def _array_names(self) -> list[str]:
        return [f"word{number}" for number in self.numbers]


def refine_words(
    explainer: Explainer,
    picture: LoadedImage,
    prompt: str | None = None,
    words: Sequence[int] | None = None,
    *,
    answer: str | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Iterator[WordExplanation]:
    """Let a model write about a photograph, and yield the explanation of one word more after each chunk of samples.

    Args:
        explainer: holds a model that writes text.
        picture: the photograph.
        prompt: the question; None for captioners.
        words: numbers of the words to explain, counted from 1; None for all.
        answer: text to use instead of the model's own answer.
        max_tokens: the largest number of tokens.
    """
    model = explainer.model
    if not isinstance(model, TextGenerator):
        raise OptionError(f"{model.spec} writes no text; a prompt is for models that do")
    answered = model.with_prompt(picture.image, prompt, answer=answer, max_tokens=max_tokens)
    numbers = tuple(words) if words is not None else tuple(range(1, len(answered.words) + 1))
    for number in numbers:
        if not 1 <= number <= len(answered.words):
            raise OptionError(f"word {number} of {answered.answer!r}, which has words 1 to {len(answered.words)}")
    explainer = explainer.with_model(answered)
    parts: tuple[ScoreExplanation, ...] = ()
    for count, number in enumerate(numbers, 1):
        name = f"word:{number}:{answered.words[number - 1].text}"
        for part in refine_score(explainer, picture, answered.inputs, name, answered.score(number - 1)):
            so_far = (*parts, part)
            yield WordExplanation(**shared_fields(so_far), answered=answered, prompt=prompt, numbers=numbers[:count])
        parts = so_far


def explain_words(
    explainer: Explainer,
    picture: LoadedImage,
    prompt: str | None = None,
    words: Sequence[int] | None = None,
    *,
    answer: str | None = None,
) -> WordExplanation:
    """Return the explanation of all words after all samples; see `refine_words`."""
    *_, last = refine_words(explainer, picture, prompt, words, answer=answer)
    return last
