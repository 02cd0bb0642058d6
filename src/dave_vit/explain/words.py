"""Words that a model writes about a photograph, each with its own map: from a prompt to files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from dave_vit._internal.atomic_files import json_bytes, npz_bytes, png_bytes
from dave_vit.data.geometry import Geometry
from dave_vit.data.images import LoadedImage
from dave_vit.engine.forward import logits_of
from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.explain.classes import Explainer
from dave_vit.explain.scores import ScoreExplanation
from dave_vit.models.text_generation import MAX_TOKENS, AnsweredPrompt, TextGenerator


@dataclass(frozen=True)
class WordExplanation:
    """An answer, and maps of some of its words.

    Attributes:
        asked: the model with its prompt and its answer.
        prompt: what was asked; None for captioners.
        numbers: of the explained words, counted from 1.
        maps: of these words.
    """

    asked: AnsweredPrompt
    prompt: str | None
    numbers: tuple[int, ...]
    maps: tuple[ScoreExplanation, ...]

    @property
    def picture(self) -> LoadedImage:
        """The photograph."""
        return self.maps[0].picture

    @property
    def name(self) -> str:
        """What was explained."""
        return f"words:{','.join(map(str, self.numbers))}"

    @property
    def words(self) -> list[str]:
        """Of the whole answer."""
        return [word.text for word in self.asked.words]

    def strip(self) -> Image.Image:
        """One picture for each explained word, with the word under it."""
        from dave_vit.viz import draw_strip

        return draw_strip([made.overlay() for made in self.maps], [self.words[number - 1] for number in self.numbers])

    def record(self) -> dict[str, Any]:
        """All that is needed to make it again, ready for JSON."""
        explained = [
            {"word": number, "text": self.words[number - 1], "value": made.value, "seconds": round(made.seconds, 3)}
            for number, made in zip(self.numbers, self.maps, strict=True)
        ]
        said = {"prompt": self.prompt, "answer": self.asked.answer, "words": self.words, "explained": explained}
        return {**self.maps[0].shared(), **said, "tokens": list(self.asked.tokens)}

    def files(self) -> dict[str, bytes]:
        """The contents of the files that keep it, by the ending of their names."""
        arrays = {f"word{number}": made.map.numpy() for number, made in zip(self.numbers, self.maps, strict=True)}
        return {"json": json_bytes(self.record()), "npz": npz_bytes(arrays), "words.png": png_bytes(self.strip())}


def explain_words(
    explainer: Explainer,
    picture: LoadedImage,
    prompt: str | None = None,
    words: Sequence[int] | None = None,
    *,
    answer: str | None = None,
    longest: int = MAX_TOKENS,
) -> WordExplanation:
    """Lets a model write about a photograph, and makes one map for each word.

    Args:
        explainer: holds a model that writes text.
        picture: the photograph.
        prompt: the question; None for captioners.
        words: numbers of the words to explain, counted from 1; None for all.
        answer: what is taken as its answer, in place of the one that it gives.
        longest: the largest number of tokens.
    """
    model = explainer.model
    if not isinstance(model, TextGenerator):
        raise OptionError(f"{model.spec} writes no text; a prompt is for models that do")
    asked = model.with_prompt(picture.image, prompt, answer=answer, max_tokens=longest)
    numbers = tuple(words) if words is not None else tuple(range(1, len(asked.words) + 1))
    for number in numbers:
        if not 1 <= number <= len(asked.words):
            raise OptionError(f"word {number} of {asked.answer!r}, which has words 1 to {len(asked.words)}")
    on_it, geometry = explainer.on(asked), Geometry.measure(asked.preprocessing, picture.image.size)
    maps = tuple(_word(on_it, picture, asked, number, geometry) for number in numbers)
    return WordExplanation(asked, prompt, numbers, maps)


def _word(
    explainer: Explainer, picture: LoadedImage, asked: AnsweredPrompt, number: int, geometry: Geometry
) -> ScoreExplanation:
    start, score = time.perf_counter(), asked.score(number - 1)
    explanation = explainer.method.explain(asked.inputs, score)
    value = float(logits_of(asked, asked.inputs, Target(score=score).read))
    name = f"word:{number}:{asked.words[number - 1].text}"
    return ScoreExplanation(explainer, picture, name, value, explanation, geometry, time.perf_counter() - start)
