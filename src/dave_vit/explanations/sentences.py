"""Explain the similarity of a photograph and a sentence: the map of the photograph, and the share of each word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dave_vit.data.images import LoadedImage
from dave_vit.engine.scores import ClassLogit
from dave_vit.explanations.explainer import Explainer
from dave_vit.explanations.scores import ScoreExplanation, refine_score
from dave_vit.models.zero_shot import ZeroShotAdapter


@dataclass(frozen=True)
class SentenceExplanation(ScoreExplanation):
    """A similarity, explained from both sides.

    Attributes:
        sentence: the text that the photograph is compared with.
        words: each token of the sentence with what it adds to the similarity.
    """

    sentence: str = ""
    words: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """The sentence."""
        return self.sentence

    @property
    def summary(self) -> list[str]:
        """The similarity, then the sentence with the share of each word."""
        return [f"  {self.value:.4g}: " + " ".join(f"{word} ({share:+.3g})" for word, share in self.words)]

    def details(self) -> dict[str, Any]:
        """The similarity, the sentence, and the share of each word."""
        words = [{"text": word, "share": share} for word, share in self.words]
        return {**super().details(), "prompt": self.sentence, "words": words}


def refine_sentence(
    explainer: Explainer, picture: LoadedImage, model: ZeroShotAdapter
) -> Iterator[SentenceExplanation]:
    """Yield the explanation of the similarity with a model's first sentence after each chunk of samples."""
    inputs = model.preprocess(picture.image)
    words = tuple(model.word_contributions(inputs))
    for stage in refine_score(explainer, picture, inputs, ("class:0", ClassLogit(0))):
        yield SentenceExplanation(**vars(stage), sentence=model.class_names[0], words=words)
