"""Models that write about an image: their answer, and the map of one of its words."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dave_vit.data.images import LoadedImage
from dave_vit.errors import OptionError
from dave_vit.explain.classes import Explainer, Prediction
from dave_vit.explain.scores import ScoreExplanation
from dave_vit.explain.words import WordExplanation, explain_words
from dave_vit.models.text_generation import AnsweredPrompt, TextGenerator
from dave_vit.viz import scale_map
from dave_vit.web.images import png_text
from dave_vit.web.schema import Answer, AskQuery, ExplainQuery, Step, plane

_SIDE = 640  # pixels of the longer side of what the page shows


def answer(model: object, picture: LoadedImage, query: AskQuery) -> Answer:
    """What a model writes about an image."""
    if not isinstance(model, TextGenerator):
        raise OptionError("this model writes no text; a prompt is for models that do")
    asked = model.with_prompt(picture.image, query.prompt or None)
    shown = picture.image.convert("RGB").resize(_fitting(picture.image.size))
    return Answer(
        name=picture.name,
        answer=asked.answer,
        words=[word.text for word in asked.words],
        picture=png_text(shown),
        notes=list(picture.notes),
    )


def word_of(explainer: Explainer, picture: LoadedImage, query: ExplainQuery) -> tuple[WordExplanation, Step]:
    """The map of a word; the answer that was given before is not written again."""
    wanted = [query.word or 1]
    written = explain_words(explainer, picture, query.prompt or None, wanted, answer=query.answer)
    return written, _step(written)


def _step(written: WordExplanation) -> Step:
    (made,), (number,) = written.maps, written.numbers
    explained = made.explanation
    place = _placing(made)
    values, signed = place(explained.map), place(explained.signed)
    error, sureness = explained.standard_error, explained.sureness
    doubts = [doubt for doubt in explained.doubts if doubt]
    return Step(
        target=_prediction(written.asked, number, made.value),
        against=None,
        method=made.explainer.name,
        samples=explained.samples,
        total=explained.samples,
        seconds=round(made.seconds, 3),
        width=values.shape[1],
        height=values.shape[0],
        unit=made.explainer.method.info.unit.replace("own", ""),
        notes=[*made.picture.notes, *doubts],
        map=plane(values, scale_map(values)),
        signed=plane(signed, scale_map(signed, signed=True)),
        standard_error=None if error is None else plane(place(error), scale_map(place(error))),
        sureness=None if sureness is None else plane(place(sureness), scale_map(place(sureness))),
    )


def _placing(made: ScoreExplanation) -> Callable[[Tensor], Tensor]:
    """Brings maps [1, H', W'] of the input into the frame of what the page shows, [H, W]."""
    geometry = made.geometry.resize_photo(_fitting(made.geometry.photo_size))
    return lambda maps: geometry.to_photo(maps[0].detach().float().cpu())


def _fitting(size: tuple[int, int]) -> tuple[int, int]:
    factor = min(1.0, _SIDE / max(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


@torch.no_grad()
def _prediction(asked: AnsweredPrompt, number: int, value: float) -> Prediction:
    """A word, and how likely it is after those before it."""
    word, score = asked.words[number - 1], asked.score(number - 1)
    likely = asked(asked.inputs).logits[0].double().softmax(-1)  # [positions, vocabulary]
    pieces = zip(score.positions, score.tokens, strict=True)  # type: ignore[attr-defined]
    return Prediction(number, word.text, math.prod(float(likely[place, token]) for place, token in pieces), value)
