"""Explain one class of a sound: the map over its spectrogram, with axes in time and frequency."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.backends.backend_agg import FigureCanvasAgg

from dave_vit.data.images import LoadedImage
from dave_vit.errors import escape_unprintable
from dave_vit.explanations.classes import ClassExplanation, classify, refine_classes
from dave_vit.explanations.explainer import Explainer
from dave_vit.models.audio import HOP, AudioModel
from dave_vit.viz import Drawing, Scales, View, to_pillow
from dave_vit.viz.rendering import as_image

_TICKS = (125, 500, 1000, 2000, 4000, 8000)  # Hz


@dataclass(frozen=True)
class SoundExplanation(ClassExplanation):
    """The map of one sound."""

    figure_name: ClassVar[str] = "spectrogram"

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw the spectrogram, and below it the map over it, by seconds and Hz."""
        figure = Drawing(figsize=(9, 5), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        pictures = (self.picture.image, self.overlay(view, scales))
        titles = (self.picture.name, f"{self.caption}: {self.method_label}")
        bands, columns = self.inputs.shape[-2:]
        for part, picture, title in zip(figure.subplots(2, 1), pictures, titles, strict=True):
            part.imshow(picture.convert("RGB"), aspect="auto", extent=(0, HOP * columns, 0, bands))
            part.set_title(title, fontsize=9)
            part.set_yticks(*self._frequency_ticks())
            part.set(xlabel="seconds", ylabel="Hz")
        return figure

    def _frequency_ticks(self) -> tuple[list[float], list[str]]:
        """Return the places and the names of round frequencies; places count bands from the bottom."""
        bands = self._model.frequencies()
        shown = [tick for tick in _TICKS if bands[0] <= tick <= bands[-1]]
        return [int((bands - tick).abs().argmin()) + 0.5 for tick in shown], [str(tick) for tick in shown]

    @property
    def _model(self) -> AudioModel:
        assert isinstance(self.explainer.model, AudioModel)
        return self.explainer.model

    def details(self) -> dict[str, Any]:
        """As of pictures, with the seconds of a column and the frequency of each row, from the top."""
        seconds = [round(HOP * column, 3) for column in range(self.inputs.shape[-1])]
        return {
            **super().details(),
            "seconds_of_columns": seconds,
            "hertz_of_rows": self._model.frequencies().flip(0).tolist(),
        }


def refine_sound(explainer: Explainer, source: str, target: str | None = None) -> Iterator[SoundExplanation]:
    """Yield the explanation of classes of a sound after each chunk of samples."""
    inputs = explainer.model.preprocess(source)
    shown = to_pillow(as_image(explainer.model.preprocessing.picture(inputs)[0]))
    classified = classify(explainer.model, LoadedImage(escape_unprintable(Path(source).stem), shown), inputs)
    for stage in refine_classes(explainer, classified, classified.pick(target)):
        yield SoundExplanation(**vars(stage))
