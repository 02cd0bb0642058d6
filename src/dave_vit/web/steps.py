"""From an explanation to the step that the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dave_vit.explanations.classes import ClassExplanation, Prediction
from dave_vit.explanations.evidence import WordEvidence
from dave_vit.explanations.words import WordExplanation
from dave_vit.models.text_generation import AnsweredPrompt
from dave_vit.viz import Panel
from dave_vit.viz.cells import MAX_CERTAINTY
from dave_vit.viz.rendering import MapLike, as_map
from dave_vit.web.schema import ExplainStep, Plane, Sources, TracedWord

_LONGER_SIDE = 640  # pixels of what the page shows for models that write


def class_step(result: ClassExplanation) -> ExplainStep:
    """Return the map of a class, after as many samples as there are."""
    panel, against = result.panels[0], result.against
    return _build_step(
        panel,
        target=result.targets[0],
        against=against["name"] if isinstance(against, dict) else against,
        method=result.explainer.name,
        samples=result.explanation.samples,
        total=result.explainer.max_samples if panel.standard_error is not None else 1,
        seconds=round(result.seconds, 3),
    )


def word_step(result: WordExplanation) -> ExplainStep:
    """Return the map of the only word that was explained."""
    (word,), (number,) = result.parts, result.numbers
    explanation = word.explanation
    geometry = word.geometry.resize_photo(display_size(word.geometry.photo_size))
    maps: dict[str, Any] = {  # [1, H', W'] of the input -> [H, W] of what the page shows
        name: geometry.to_photo(values[0].detach().float().cpu())
        for name in ("map", "standard_error", "signed", "certainty")
        if (values := getattr(explanation, name)) is not None
    }
    return _build_step(
        Panel(target=word.name, unit="logit" if word.unit else "", **maps),
        target=_word_prediction(result.answered, number, word.value),
        against=None,
        method=word.explainer.name,
        samples=explanation.samples,
        total=explanation.samples,
        seconds=round(word.seconds, 3),
        notes=[*word.picture.notes, *filter(None, explanation.warnings)],
    )


def traced_words(answered: AnsweredPrompt, evidence: Sequence[WordEvidence] | None) -> list[TracedWord]:
    """Return the words of an answer with their probabilities and sources."""
    sources = [None] * len(answered.words) if evidence is None else [Sources(**one.record()) for one in evidence]
    rows = zip(answered.words, answered.probabilities(), sources, strict=True)
    return [TracedWord(text=word.text, probability=chance, sources=parts) for word, chance, parts in rows]


def display_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the size in which the page shows a photograph to models that write: large ones are scaled down."""
    factor = min(1.0, _LONGER_SIDE / max(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def _build_step(panel: Panel, **fields: Any) -> ExplainStep:
    values, certainty = as_map(panel.map), _encode_optional(panel.certainty)
    return ExplainStep(
        width=values.shape[1],
        height=values.shape[0],
        unit=panel.unit,
        map=Plane.encode(values),
        signed=Plane.encode(values if panel.signed is None else panel.signed, signed=True),
        standard_error=_encode_optional(panel.standard_error),
        certainty=certainty and certainty.model_copy(update={"limit": MAX_CERTAINTY, "caption": "as in every figure"}),
        **fields,
    )


def _encode_optional(values: MapLike | None) -> Plane | None:
    return None if values is None else Plane.encode(values)


def _word_prediction(answered: AnsweredPrompt, number: int, value: float) -> Prediction:
    """Return a word with its probability after the words before it."""
    return Prediction(number, answered.words[number - 1].text, answered.probabilities()[number - 1], value)
