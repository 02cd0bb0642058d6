"""A photograph and a sentence: the map of one for the other, and the share of each word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dave_vit._internal.atomic_files import json_bytes
from dave_vit.data.images import LoadedImage
from dave_vit.explain.classes import Explainer
from dave_vit.explain.scores import ScoreExplanation, explain_score
from dave_vit.models.zero_shot import ZeroShotAdapter


@dataclass(frozen=True)
class SentenceExplanation:
    """A similarity, explained from both sides.

    Attributes:
        sentence: what the photograph is compared with.
        scored: the map of the photograph.
        words: each token of the sentence, with what it adds to the similarity.
    """

    sentence: str
    scored: ScoreExplanation
    words: tuple[tuple[str, float], ...]

    @property
    def name(self) -> str:
        """What was explained."""
        return self.sentence

    @property
    def picture(self) -> LoadedImage:
        """The photograph."""
        return self.scored.picture

    @property
    def line(self) -> str:
        """The similarity, then the sentence with the share of each word behind it."""
        return f"{self.scored.value:.4g}: " + " ".join(f"{word} ({share:+.3g})" for word, share in self.words)

    def record(self) -> dict[str, Any]:
        """All that is needed to make it again, ready for JSON."""
        words = [{"text": word, "share": share} for word, share in self.words]
        return {**self.scored.record(), "prompt": self.sentence, "words": words}

    def files(self) -> dict[str, bytes]:
        """The contents of the files that keep it, by the ending of their names."""
        return {**self.scored.files(), "json": json_bytes(self.record())}


def explain_match(explainer: Explainer, picture: LoadedImage, model: ZeroShotAdapter) -> SentenceExplanation:
    """Explains the similarity of a photograph with the first sentence of a model."""
    scored = explain_score(explainer, picture, "class:0")
    words = model.word_contributions(model.preprocess(picture.image))
    return SentenceExplanation(model.class_names[0], scored, tuple(words))
