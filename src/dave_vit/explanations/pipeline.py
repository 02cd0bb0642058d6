"""The one loop of `dave explain`: read a source, explain it by its kind, write its files, report what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dave_vit._internal.atomic_files import png_bytes
from dave_vit.data.geometry import Geometry
from dave_vit.data.images import LoadedImage, read_image
from dave_vit.engine.scores import parse_score
from dave_vit.errors import ImageError, OptionError, escape_unprintable
from dave_vit.explanations.base import ImageExplanation
from dave_vit.explanations.classes import classify, refine_classes
from dave_vit.explanations.clips import refine_clip
from dave_vit.explanations.explainer import Explainer
from dave_vit.explanations.gallery import Gallery
from dave_vit.explanations.output_files import OutputFolder
from dave_vit.explanations.pages import refine_page
from dave_vit.explanations.scores import BoxesExplanation, explain_boxes, refine_score
from dave_vit.explanations.sentences import refine_sentence
from dave_vit.explanations.sounds import refine_sound
from dave_vit.explanations.volumes import refine_volume
from dave_vit.explanations.words import refine_words
from dave_vit.models import Adapter
from dave_vit.models.audio import AudioModel
from dave_vit.models.retrieval import PageRetriever
from dave_vit.models.tasks import NamedScore, PromptedModel, TaskModel, TextDetector
from dave_vit.models.text_generation import TextGenerator
from dave_vit.models.video import VideoModel
from dave_vit.models.volume import VolumeModel
from dave_vit.models.zero_shot import ZeroShotAdapter
from dave_vit.viz import AnimationStep, Scales, View, animate
from dave_vit.viz.rendering import as_map

Stages = list[ImageExplanation]
"""The explanation after each chunk of samples; the last one is the result."""
Written = tuple[ImageExplanation, dict[str, Any]]
"""A result whose files are written, and its record with the source and the names of the files."""
Labelled = tuple[str, Stages]
"""A label for the names of files, and the stages of one explanation."""


@dataclass(frozen=True)
class Question:
    """What is explained of each picture; the fields are options of `dave explain`, None or False where not given."""

    target: str | None = None
    score: str | None = None
    boxes: bool = False
    threshold: float | None = None
    prompt: str | None = None
    words: tuple[int | str, ...] | None = None
    answer: str | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class FigureStyle:
    """How results are drawn.

    Attributes:
        view: "map" for what speaks for the target, "signed" with what speaks against it.
        scales: one colour scale for all maps of a picture, or one for each.
        figure_format: "png", "svg" or "pdf".
        animation: "gif" or "webp" to show how the map refines; None for no animation.
    """

    view: View = "map"
    scales: Scales = "shared"
    figure_format: str = "png"
    animation: Literal["gif", "webp"] | None = None


@dataclass(frozen=True)
class ExplanationKind:
    """A kind of explanation.

    Attributes:
        subject: what it explains, in error messages.
        options: fields of `Question` that it takes.
        explain: makes the explanations of one source.
        has_tiles: whether photographs can be explained in tiles.
    """

    subject: str
    options: tuple[str, ...]
    explain: Callable[[Explainer, str, Question], Iterator[Labelled]]
    has_tiles: bool = False


class Pipeline:
    """Explains one source after another and writes the files.

    Args:
        explainer: the model and the method.
        question: what is explained of each source.
        style: how results are drawn.
        folder: where files are written.
        gallery: collects the results, to show them together.

    Attributes:
        records: of all results, after their files are written.
        failures: how many sources could not be explained.
    """

    def __init__(
        self, explainer: Explainer, question: Question, style: FigureStyle, folder: OutputFolder, gallery: Gallery
    ) -> None:
        self.explainer, self.question, self.style = explainer, question, style
        self.folder, self.gallery = folder, gallery
        self.kind = _check_question(_find_kind(explainer.model, question), explainer.model, question, style)
        self.records: list[dict[str, Any]] = []
        self.failures = 0

    def run(self, sources: Sequence[str], report: Callable[[float, str], None]) -> Iterator[Written | ImageError]:
        """Explain all sources; yield each result after its files are written, or why a source cannot be explained.

        Args:
            sources: files, or `-` for standard input.
            report: called with the number of sources that are done, and the name of the current one.
        """
        for number, source in enumerate(sources):
            name = escape_unprintable(Path(source).name)
            self.explainer.on_progress = partial(_report_share, report, number, name)
            self.explainer.on_progress(0.0)
            try:
                yield from self._explain(source)
            except ImageError as error:
                self.failures += 1
                yield error

    def write_gallery(self, explained: int) -> dict[str, Any] | None:
        """Write the page and the contact sheet of all results, and return their record; None of a single source."""
        if explained < 2:
            return None
        labels = self._labels(_target_label(self.question))
        return self.folder.write_gallery(self.records, self.gallery.files(), self.gallery.record(), labels)

    def _explain(self, source: str) -> Iterator[Written]:
        """Explain one source and write the files of each result."""
        view, scales = self.style.view, self.style.scales
        for label, stages in self.kind.explain(self.explainer, source, self.question):
            last = stages[-1]
            if view == "signed" and all(as_map(panel.values(view)).min() >= 0 for panel in last.panels):
                raise OptionError(f"the maps of {self.explainer.name} have no negative values; leave out --view signed")
            files = last.files(self.style.figure_format, view=view, scales=scales)
            if self.style.animation:
                files[self.style.animation] = _animate(stages, self.style.animation)
            record = {"source": escape_unprintable(source), **last.record()}
            record = self.folder.write(last.picture, self._facts(label), files, record, self._labels(label))
            if not isinstance(last, BoxesExplanation):  # it shows what has its own records
                overlay = files.get("overlay.png") or png_bytes(last.overlay(view, scales))
                self.gallery.add(last, overlay, record)
                self.records.append(record)
            yield last, record

    def _labels(self, label: str) -> list[str]:
        """Return the labels of file names; what is the default has none."""
        method, view = self.explainer.name, self.style.view
        return [label, "" if method == "dave" else method, "" if view == "map" else view]

    def _facts(self, label: str) -> dict[str, Any]:
        """Return all that decides a result, as plain data."""
        explainer, model = self.explainer, self.explainer.model
        return {
            "model": model.spec,
            "weights": explainer.weights,
            "prepare": model.prepare and asdict(model.prepare),
            "method": explainer.name,
            "options": {name: value for name, value in explainer.options.items() if name != "chunk"},
            "against": explainer.against,
            "question": {**asdict(self.question), "target": self.question.target or "top1", "label": label},
            "style": [self.style.view, self.style.scales],
        }


def _explain_classes(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    classified = classify(explainer.model, read_image(source))
    stages = refine_classes(explainer, classified, classified.pick(question.target or "top1"))
    yield _target_label(question), [*stages]


def _explain_clip(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    yield _target_label(question), [*refine_clip(explainer, source, question.target or "top1")]


def _explain_sound(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    yield _target_label(question), [*refine_sound(explainer, source, question.target or "top1")]


def _explain_volume(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    yield _target_label(question), [*refine_volume(explainer, source, question.target or "top1")]


def _explain_page(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    yield question.prompt or "", [*refine_page(explainer, read_image(source), question.prompt)]


def _explain_sentence(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    assert isinstance(explainer.model, ZeroShotAdapter)
    yield question.prompt or "", [*refine_sentence(explainer, read_image(source), explainer.model)]


def _explain_words(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    picture = read_image(source)
    limit = {} if question.max_tokens is None else {"max_tokens": question.max_tokens}
    yield "", [*refine_words(explainer, picture, question.prompt, question.words, answer=question.answer, **limit)]


def _explain_score(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    picture = read_image(source)
    explainer = _with_prompt(explainer, picture, question.prompt)
    score = _find_score(explainer.model, picture, question.score)
    yield score[0], [*refine_score(explainer, picture, explainer.model.preprocess(picture.image), score)]


def _explain_boxes(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    picture = read_image(source)
    explainer = _with_prompt(explainer, picture, question.prompt)
    chosen = {} if question.threshold is None else {"threshold": question.threshold}
    for number, stages in enumerate(explain_boxes(explainer, picture, **chosen), 1):
        yield "boxes" if isinstance(stages[-1], BoxesExplanation) else f"box{number}", stages


KINDS = {
    "classes": ExplanationKind("classes", ("target",), _explain_classes, has_tiles=True),
    "clip": ExplanationKind("a clip", ("target",), _explain_clip),
    "sound": ExplanationKind("a sound", ("target",), _explain_sound),
    "volume": ExplanationKind("a volume", ("target",), _explain_volume),
    "page": ExplanationKind("a page", ("prompt",), _explain_page),
    "sentence": ExplanationKind("a sentence", ("prompt",), _explain_sentence),
    "words": ExplanationKind("words", ("prompt", "words", "answer", "max_tokens"), _explain_words),
    "score": ExplanationKind("a score", ("score", "prompt"), _explain_score),
    "boxes": ExplanationKind("boxes", ("boxes", "threshold", "prompt"), _explain_boxes),
}


def _find_kind(model: Adapter, question: Question) -> ExplanationKind:
    """Return the kind of explanation that a question means for a model."""
    if isinstance(model, VideoModel):
        return KINDS["clip"]
    if isinstance(model, AudioModel):
        return KINDS["sound"]
    if isinstance(model, VolumeModel):
        return KINDS["volume"]
    if question.score is not None:
        return KINDS["score"]
    if isinstance(model, TextGenerator):
        return KINDS["words"]
    if isinstance(model, PageRetriever):
        return KINDS["page"]
    if isinstance(model, ZeroShotAdapter) and question.prompt is not None:
        return KINDS["sentence"]
    is_detector = isinstance(model, TaskModel) and model.task.default_score == "boxes"
    if question.boxes or is_detector or isinstance(model, TextDetector):
        return KINDS["boxes"]
    return KINDS["score" if isinstance(model, PromptedModel | TaskModel) else "classes"]


def _check_question(kind: ExplanationKind, model: Adapter, question: Question, style: FigureStyle) -> ExplanationKind:
    """Refuse options that a kind of explanation cannot follow."""
    for option, value in asdict(question).items():
        if value not in (None, False) and option not in kind.options:
            raise OptionError(
                f"{model.spec} explains {kind.subject} and takes no {option}; leave --{option.replace('_', '-')} out"
            )
    if model.preprocessing.parts is not None and not kind.has_tiles:
        raise OptionError(f"--fit tiles explains classes of pictures, not {kind.subject}; take pad or squash")
    if style.animation and kind in (KINDS["clip"], KINDS["volume"]):
        raise OptionError("the animation of a clip shows its frames; leave out --animate")
    return kind


def _report_share(report: Callable[[float, str], None], number: int, name: str, share: float) -> None:
    report(number + share, name)


def _target_label(question: Question) -> str:
    return "" if question.target in (None, "top1") else str(question.target)


def _with_prompt(explainer: Explainer, picture: LoadedImage, prompt: str | None) -> Explainer:
    """Return the explainer of a model that has its prompt, where it takes one."""
    model = explainer.model
    if isinstance(model, TextGenerator):
        return explainer.with_model(model.with_prompt(picture.image, prompt, answer=""), against=explainer.against)
    if isinstance(model, PromptedModel):
        return explainer.with_model(model.with_prompt(picture.image, prompt), against=explainer.against)
    if prompt is not None:
        raise OptionError(f"{model.spec} takes no prompt; leave --prompt out")
    return explainer


def _find_score(model: Adapter, picture: LoadedImage, text: str | None) -> NamedScore:
    """Return the score that a text means; where there is none, the default of the model."""
    if text is not None:
        return text, parse_score(text, model, Geometry.measure(model.preprocessing, picture.image.size))
    usual = model.task.default_score if isinstance(model, TaskModel) else None
    if not isinstance(usual, tuple):
        advice = model.task.advice if isinstance(model, TaskModel) else "give what to explain, such as --score value"
        raise OptionError(f"{model.spec} is not a classifier; {advice}")
    return usual


def _animate(stages: Stages, animation: str) -> bytes:
    """Draw how the map of the first target refines."""
    refined = {id(stage.explanation): stage for stage in stages}.values()  # later words leave the first one as it is
    panels = [(stage.explanation.samples, stage.panels[0]) for stage in refined]
    return animate(stages[-1].image, [AnimationStep(count, one.map, one.certainty) for count, one in panels], animation)
