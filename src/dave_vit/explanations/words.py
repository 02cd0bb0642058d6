"""Explain the words that a model writes about a photograph, each with a map of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from dave_vit.data.images import LoadedImage
from dave_vit.errors import OptionError
from dave_vit.explanations.base import draw_strip, overlay_maps
from dave_vit.explanations.evidence import WordEvidence, find_evidence
from dave_vit.explanations.explainer import Explainer
from dave_vit.explanations.scores import JointExplanation, ScoreExplanation, refine_scores, shared_fields
from dave_vit.models.text_generation import MAX_TOKENS, AnsweredPrompt, TextGenerator
from dave_vit.viz import Cell, Drawing, Scales, ShadedWord, View, sentence_cell

_MAP_BYTES = 2**29  # of the maps of all words in one pass
_VIEWS_PER_PASS = 20  # as methods run on a CPU
_COLUMNS = 6  # of the figure
_LEGEND = (
    "Shaded by the image's share of the evidence: violet for a word, orange against it. Underlined: not grounded in "
    "the image."
)


@dataclass(frozen=True)
class WordExplanation(JointExplanation):
    """An answer with the maps of some of its words.

    Attributes:
        answered: the model with its prompt and its answer.
        prompt: the question; None for captioners.
        numbers: the explained words, counted from 1.
        against: "rivals" or "none", what the words are set against.
    """

    figure_name: ClassVar[str] = "words"

    answered: AnsweredPrompt
    prompt: str | None
    numbers: tuple[int, ...]
    against: str | int = "rivals"

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
        """The answer, then for each explained word its probability and where it comes from."""
        return [f"  {self.answered.answer}", *(f"  {line}" for line in self._describe_words())]

    def _describe_words(self) -> Iterator[str]:
        long = max(map(len, self._explained_words))
        for text, chance, evidence in self._rows:
            sources = "" if evidence is None else f"  {evidence.describe()}"
            yield f"{chance:6.1%}  {text:{long}}{sources}"

    @cached_property
    def evidence(self) -> list[WordEvidence] | None:
        """Where the score of each explained word comes from; None where the model cannot be decomposed exactly."""
        seed = int(getattr(self.explainer.method, "seed", 0))
        return find_evidence(self.answered, [part.score for part in self.parts], seed=seed)

    @cached_property
    def probabilities(self) -> list[float]:
        """The probability of each word of the answer, given all before it."""
        return self.answered.probabilities()

    @property
    def _rows(self) -> list[tuple[str, float, WordEvidence | None]]:
        """Text, probability and evidence of each explained word."""
        chances = [self.probabilities[number - 1] for number in self.numbers]
        evidence: Sequence[WordEvidence | None] = self.evidence or [None] * len(chances)
        return list(zip(self._explained_words, chances, evidence, strict=True))

    @property
    def notes(self) -> tuple[str, ...]:
        """As of other kinds, and whether there are no shares."""
        missing = "the model cannot be decomposed exactly, so its words have maps but no shares"
        return (*super().notes, *([missing] if self.evidence is None else []))

    @property
    def _explained_words(self) -> list[str]:
        return [self.words[number - 1] for number in self.numbers]

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the sum of the maps over the photograph: the map of all explained words together."""
        total = torch.stack(self._viewed_maps(view)).sum(0)
        return overlay_maps([self.picture.image], [total], view, scales)[0]

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw the answer with each word shaded by the share of the image, and one overlay per word below."""
        overlays = overlay_maps([self.picture.image] * len(self.parts), self._viewed_maps(view), view, scales)
        titles = [f"{text}, {chance:.0%}" for text, chance, _ in self._rows]
        columns = min(_COLUMNS, len(overlays))
        return draw_strip(overlays, titles, columns=columns, above=self._draw_answer(columns), notes=[_LEGEND])

    def _draw_answer(self, columns: int) -> Cell:
        known = {number: evidence for number, (_, _, evidence) in zip(self.numbers, self._rows, strict=True)}
        words = []
        for number, text in enumerate(self.words, 1):
            evidence = known.get(number)
            is_marked = evidence is not None and not evidence.is_grounded
            words.append(ShadedWord(text, None if evidence is None else evidence.image_share, is_marked))
        return sentence_cell(words, columns=columns)

    def _viewed_maps(self, view: View) -> list[Tensor]:
        return [part.viewed_map(view) for part in self.parts]

    def details(self) -> dict[str, Any]:
        """The prompt, the answer, and the value, the probability and the sources of each explained word."""
        explained = [
            {
                "word": number,
                "text": text,
                "value": part.value,
                "probability": chance,
                "evidence": None if evidence is None else evidence.record(),
                "seconds": round(part.seconds, 3),
            }
            for number, part, (text, chance, evidence) in zip(self.numbers, self.parts, self._rows, strict=True)
        ]
        answer = {"prompt": self.prompt, "answer": self.answered.answer, "words": self.words}
        return {**answer, "against": self.against, "explained": explained, "tokens": list(self.answered.tokens)}

    def _array_names(self) -> list[str]:
        return [f"word{number}" for number in self.numbers]


def refine_words(
    explainer: Explainer,
    picture: LoadedImage,
    prompt: str | None = None,
    words: Sequence[int | str] | None = None,
    *,
    answer: str | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Iterator[WordExplanation]:
    """Let a model write about a photograph, and yield the explanation of its words after each chunk of samples.

    Args:
        explainer: holds a model that writes text.
        picture: the photograph.
        prompt: the question; None for captioners.
        words: the words to explain, as numbers counted from 1 or as texts; None for all.
        answer: text to use instead of the model's own answer.
        max_tokens: the largest number of tokens.
    """
    model = explainer.model
    if not isinstance(model, TextGenerator):
        raise OptionError(f"{model.spec} writes no text; a prompt is for models that do")
    answered = model.with_prompt(picture.image, prompt, answer=answer, max_tokens=max_tokens)
    if not answered.words:
        raise OptionError("the answer has no words; give at least one, such as --answer 'a red cup'")
    everything = range(1, len(answered.words) + 1)
    numbers = tuple(number for word in (words or everything) for number in _find_word(answered, word))
    bound, against = explainer.with_model(answered, against=None), explainer.against or "rivals"
    bound.maps *= len(numbers)
    parts: tuple[ScoreExplanation, ...] = ()
    for group in _group_words(numbers, answered.inputs):
        scores = answered.scores([number - 1 for number in group], against=against)
        names = [f"word:{number}:{answered.words[number - 1].text}" for number in group]
        for stage in refine_scores(bound, picture, answered.inputs, list(zip(names, scores, strict=True))):
            so_far = (*parts, *stage)
            explained = numbers[: len(so_far)]
            yield WordExplanation(
                **shared_fields(so_far), answered=answered, prompt=prompt, numbers=explained, against=against
            )
        parts = so_far


def _find_word(answered: AnsweredPrompt, word: int | str) -> list[int]:
    """Return the numbers of a word of an answer, given by its number or its text."""
    texts = {number: each.text.casefold() for number, each in enumerate(answered.words, 1)}
    found = [number for number, text in texts.items() if word in (number, text) or str(word).casefold() == text]
    if not found:
        raise OptionError(f"no word {word} in {answered.answer!r}, which has words 1 to {len(texts)}; see --answer")
    return found


def _group_words(numbers: Sequence[int], inputs: Tensor) -> Iterator[Sequence[int]]:
    """Yield words that are explained in the same forward passes: as many as their maps leave memory for."""
    most = max(1, _MAP_BYTES // (_VIEWS_PER_PASS * inputs.numel() * inputs.element_size()))
    yield from (numbers[start : start + most] for start in range(0, len(numbers), most))


def explain_words(
    explainer: Explainer,
    picture: LoadedImage,
    prompt: str | None = None,
    words: Sequence[int | str] | None = None,
    *,
    answer: str | None = None,
) -> WordExplanation:
    """Return the explanation of all words after all samples; see `refine_words`."""
    *_, last = refine_words(explainer, picture, prompt, words, answer=answer)
    return last
