"""Explain why a page fits a query: the map of the whole score, and one of each word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import Image

from dave_vit.data.images import LoadedImage
from dave_vit.engine.scores import ClassLogit
from dave_vit.explanations.base import draw_strip, overlay_maps
from dave_vit.explanations.explainer import Explainer
from dave_vit.explanations.scores import JointExplanation, refine_scores, shared_fields
from dave_vit.models.retrieval import PageRetriever, total_score
from dave_vit.models.tasks import NamedScore
from dave_vit.viz import Drawing, Scales, View

_COLUMNS = 4  # of the figure


@dataclass(frozen=True)
class PageExplanation(JointExplanation):
    """The score of a page and a query: the first part is the total, the others are its words.

    Attributes:
        query: the text.
        words: of the query; the last one is of its marks.
    """

    figure_name: ClassVar[str] = "words"

    query: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The query."""
        return self.query

    @property
    def caption(self) -> str:
        """The query and the total."""
        return f"{self.query}, {self.parts[0].value:.4g}"

    @property
    def summary(self) -> list[str]:
        """The total, then the query with the score of each word."""
        scores = (f"{word} ({part.value:.3g})" for word, part in zip(self.words, self.parts[1:], strict=True))
        return [f"  {self.parts[0].value:.4g}: {' '.join(scores)}"]

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the map of the total over the page."""
        return self.parts[0].overlay(view, scales)

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw the map of the total and those of the words."""
        maps = [part.viewed_map(view) for part in self.parts]
        overlays = overlay_maps([self.picture.image] * len(maps), maps, view, "own")
        titles = [f"{name}, {part.value:.3g}" for name, part in zip(("total", *self.words), self.parts, strict=True)]
        return draw_strip(overlays, titles, columns=min(_COLUMNS, len(overlays)))

    def details(self) -> dict[str, Any]:
        """The query, the total and the score of each word."""
        words = [{"text": word, "score": part.value} for word, part in zip(self.words, self.parts[1:], strict=True)]
        return {"prompt": self.query, "value": self.parts[0].value, "words": words}

    def _array_names(self) -> list[str]:
        return ["map", *(f"word{number}" for number in range(1, len(self.parts)))]


def refine_page(explainer: Explainer, picture: LoadedImage, query: str | None) -> Iterator[PageExplanation]:
    """Yield the explanation of a page's score, in total and for each word of a query, after each chunk of samples."""
    assert isinstance(explainer.model, PageRetriever)
    bound = explainer.with_model(explainer.model.with_prompt(picture.image, query), against=explainer.against)
    words = tuple(bound.model.class_names)
    scores: list[NamedScore] = [("total", total_score)]
    scores += [(f"class:{number}", ClassLogit(number)) for number in range(len(words))]
    for parts in refine_scores(bound, picture, bound.model.preprocess(picture.image), scores):
        yield PageExplanation(**shared_fields(parts), query=query or "", words=words)
