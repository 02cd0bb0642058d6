"""Explain words: those that a model writes about a photograph, those of a sentence, and those of a query for pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from dave_vit.data.images import LoadedImage, join_pictures, read_image
from dave_vit.engine.scores import ClassLogit
from dave_vit.errors import OptionError
from dave_vit.explanations.base import Arrays, Labelled, tile_boxes
from dave_vit.explanations.evidence import WordEvidence, find_evidence
from dave_vit.explanations.explainer import Explainer, Question
from dave_vit.explanations.scores import JointExplanation, ScoreExplanation, refine_score, refine_scores
from dave_vit.models.retrieval import PageRetriever, ZeroShotAdapter, total_score
from dave_vit.models.text_generation import MAX_TOKENS, AnsweredPrompt, TextGenerator
from dave_vit.viz.figures import Drawing
from dave_vit.viz.panels import draw_strip
from dave_vit.viz.pictures import ShadedWord, overlay_maps, sentence_cell
from dave_vit.viz.rendering import Scales, View

_MAP_BYTES = 2**29  # of the maps of all words in one pass
_VIEWS_PER_PASS = 20  # as methods run on a CPU
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
    def words(self) -> list[str]:
        """The words of the whole answer."""
        return [word.text for word in self.answered.words]

    @cached_property
    def probabilities(self) -> list[float]:
        """The probability of each word of the answer, given all before it."""
        return self.answered.probabilities()

    @property
    def caption(self) -> str:
        """The answer."""
        return self.answered.answer

    @property
    def summary(self) -> list[str]:
        """The answer, then for each explained word its probability and where it comes from."""
        long = max(len(text) for text, _, _ in self._rows)
        lines = [f"  {self.answered.answer}"]
        for text, chance, evidence in self._rows:
            sources = "" if evidence is None else f"  {evidence.describe()}"
            lines.append(f"  {chance:6.1%}  {text:{long}}{sources}")
        return lines

    @cached_property
    def evidence(self) -> list[WordEvidence] | None:
        """Where the score of each explained word comes from; None where the model cannot be decomposed exactly."""
        seed = int(getattr(self.explainer.method, "seed", 0))
        return find_evidence(self.answered, [part.score for part in self.parts], seed=seed)

    @cached_property
    def _rows(self) -> list[tuple[str, float, WordEvidence | None]]:
        """Text, probability and evidence of each explained word."""
        evidence: Sequence[WordEvidence | None] = self.evidence or [None] * len(self.numbers)
        pairs = zip(self.numbers, evidence, strict=True)
        return [(self.words[number - 1], self.probabilities[number - 1], one) for number, one in pairs]

    @property
    def notes(self) -> tuple[str, ...]:
        """As of other kinds, and whether there are no shares."""
        missing = "the model cannot be decomposed exactly, so its words have maps but no shares"
        return (*super().notes, *([missing] if self.evidence is None else []))

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the sum of the maps over the photograph: the map of all explained words together."""
        total = torch.stack([part.viewed_map(view) for part in self.parts]).sum(0)
        return overlay_maps([self.picture.image], [total], view, scales)[0]

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw the answer with each word shaded by the share of the image, and one overlay per word below."""
        titles = [f"{text}, {chance:.0%}" for text, chance, _ in self._rows]
        columns = min(6, len(titles))
        answer = sentence_cell(self._shade_words(), columns=columns)
        return draw_strip(self._overlays(view, scales), titles, columns=columns, above=answer, notes=[_LEGEND])

    def _shade_words(self) -> list[ShadedWord]:
        rows = zip(self.numbers, self._rows, strict=True)
        known = {at: ShadedWord(text, one.image_share, not one.is_grounded) for at, (text, _, one) in rows if one}
        return [known.get(at, ShadedWord(text)) for at, text in enumerate(self.words, 1)]

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

    def arrays(self) -> Arrays:
        """As of other kinds; of several photographs, the map of each, `word1_image1`."""
        maps, boxes = super().arrays(), tile_boxes(self.answered, self.picture)
        if len(boxes) == 1:
            return maps
        row = [*enumerate(boxes, 1)]
        return {f"{name}_image{n}": one[y0:y1, x0:x1] for name, one in maps.items() for n, (x0, y0, x1, y1) in row}

    def _array_names(self) -> list[str]:
        return [f"word{number}" for number in self.numbers]


def refine_words(
    explainer: Explainer,
    picture: LoadedImage,
    prompt: str | None = None,
    words: Sequence[int | str] | None = None,
    answer: str | None = None,
    max_tokens: int | None = None,
    *,
    others: Sequence[LoadedImage] = (),
) -> Iterator[WordExplanation]:
    """Let a model write about a photograph, and yield the explanation of its words after each chunk of samples.

    Args:
        explainer: holds a model that writes text.
        picture: the photograph.
        prompt: the question; None for captioners.
        words: the words to explain, as numbers counted from 1 or as texts; None for all.
        answer: text to use instead of the model's own answer.
        max_tokens: the largest number of tokens; `MAX_TOKENS` by default.
        others: photographs that the prompt is about as well; the maps lie on all of them beside each other.
    """
    model = explainer.model
    if not isinstance(model, TextGenerator):
        raise OptionError(f"{model.spec} writes no text; a prompt is for models that do")
    pictures, most = [picture, *others], max_tokens or MAX_TOKENS
    answered = model.with_prompt([one.image for one in pictures], prompt, answer=answer, max_tokens=most)
    picture = join_pictures(pictures) if others else picture
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
            told = {"answered": answered, "prompt": prompt, "numbers": numbers[: len(so_far)], "against": against}
            yield WordExplanation.of(so_far, **told)
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


def explain_words(explainer: Explainer, picture: LoadedImage, *asked: Any, **options: Any) -> WordExplanation:
    """Return the explanation of all words after all samples; takes what `refine_words` takes."""
    *_, last = refine_words(explainer, picture, *asked, **options)
    return last


def explain_answer(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    """Yield the explanation of the words that a model writes."""
    asked = (question.prompt, question.words, question.answer, question.max_tokens)
    others = [read_image(other) for other in question.together or ()]
    yield "", [*refine_words(explainer, read_image(source), *asked, others=others)]


@dataclass(frozen=True)
class SentenceExplanation(ScoreExplanation):
    """A similarity, explained from both sides.

    Attributes:
        words: each token of the sentence, which is the name of the score, with what it adds to the similarity.
    """

    words: tuple[tuple[str, float], ...] = ()

    @property
    def summary(self) -> list[str]:
        """The similarity, then the sentence with the share of each word."""
        return [f"  {self.value:.4g}: " + " ".join(f"{word} ({share:+.3g})" for word, share in self.words)]

    def details(self) -> dict[str, Any]:
        """The similarity, the sentence, and the share of each word."""
        words = [{"text": word, "share": share} for word, share in self.words]
        return {**super().details(), "score": "class:0", "prompt": self.score_name, "words": words}


def explain_sentence(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    """Yield the explanation of the similarity with a model's first sentence."""
    model, picture = explainer.model, read_image(source)
    assert isinstance(model, ZeroShotAdapter)
    inputs = model.preprocess(picture.image)
    words = tuple(model.word_contributions(inputs))
    stages = refine_score(explainer, picture, inputs, (model.class_names[0], ClassLogit(0)))
    yield question.prompt or "", [SentenceExplanation(**vars(stage), words=words) for stage in stages]


@dataclass(frozen=True)
class PageExplanation(JointExplanation):
    """The score of a page and a query: the first part is the total, the others are its words.

    Attributes:
        query: the text.
    """

    figure_name: ClassVar[str] = "words"

    query: str

    @property
    def caption(self) -> str:
        """The query and the total."""
        return f"{self.query}, {self.parts[0].value:.4g}"

    @property
    def summary(self) -> list[str]:
        """The total, then the query with the score of each word; the last one is of its marks."""
        scores = (f"{part.score_name} ({part.value:.3g})" for part in self.parts[1:])
        return [f"  {self.parts[0].value:.4g}: {' '.join(scores)}"]

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the map of the total over the page."""
        return self.parts[0].overlay(view, scales)

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw the map of the total and those of the words."""
        titles = [f"{part.score_name}, {part.value:.3g}" for part in self.parts]
        return draw_strip(self._overlays(view, "own"), titles, columns=min(4, len(titles)))

    def details(self) -> dict[str, Any]:
        """The query, the total and the score of each word."""
        words = [{"text": part.score_name, "score": part.value} for part in self.parts[1:]]
        return {"prompt": self.query, "value": self.parts[0].value, "words": words}

    def _array_names(self) -> list[str]:
        return ["map", *(f"word{number}" for number in range(1, len(self.parts)))]


def explain_page(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    """Yield the explanation of a page's score, in total and for each word of a query."""
    picture, query = read_image(source), question.prompt
    assert isinstance(explainer.model, PageRetriever)
    bound = explainer.with_model(explainer.model.with_prompt(picture.image, query), against=explainer.against)
    words = ((word, ClassLogit(number)) for number, word in enumerate(bound.model.class_names))
    stages = refine_scores(bound, picture, bound.model.preprocess(picture.image), [("total", total_score), *words])
    yield query or "", [PageExplanation.of(parts, query=query) for parts in stages]
