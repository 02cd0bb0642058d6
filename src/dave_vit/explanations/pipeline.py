"""The one loop of `dave explain`: read a source, explain it by its kind, write its files, report what failed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dave_vit._internal.atomic_files import image_bytes
from dave_vit.data.images import read_image
from dave_vit.errors import ImageError, OptionError, escape_unprintable
from dave_vit.explanations.base import ImageExplanation, Labelled
from dave_vit.explanations.classes import classify, refine_classes
from dave_vit.explanations.explainer import Explainer, Question
from dave_vit.explanations.output_files import Gallery, OutputFolder
from dave_vit.explanations.recordings import explain_clip, explain_sound, explain_volume
from dave_vit.explanations.scores import BoxesExplanation, explain_boxes, explain_score, with_prompt
from dave_vit.explanations.words import explain_answer, explain_page, explain_sentence
from dave_vit.models import Adapter
from dave_vit.models.recordings import AudioModel, VideoModel, VolumeModel
from dave_vit.models.retrieval import PageRetriever, ZeroShotAdapter
from dave_vit.models.tasks import PromptedModel, TaskModel, TextPrompted
from dave_vit.models.text_generation import TextGenerator
from dave_vit.viz.pictures import animate
from dave_vit.viz.rendering import Scales, View, as_map

Written = tuple[ImageExplanation, dict[str, Any]]
"""A result whose files are written, and its record with the source and the names of the files."""


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
        labels = self._labels(self.question.target_label)
        # the same results under the same names are the same gallery
        question = {"results": [[one["question"], Path(one["files"][0]).name] for one in self.records]}
        return self.folder.write(None, question, self.gallery.files(), self.gallery.record(), labels)

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
            asked = {} if self.question.prompt is None else {"prompt": self.question.prompt}
            record = {"source": escape_unprintable(source), **asked, **last.record()}
            if self.question.together:
                record["together"] = [escape_unprintable(other) for other in self.question.together]
            record = self.folder.write(last.picture, self._facts(label), files, record, self._labels(label))
            if not isinstance(last, BoxesExplanation):  # it shows what has its own records
                self.gallery.add(last, files.get("overlay.png") or image_bytes(last.overlay(view, scales)), record)
                self.records.append(record)
            yield last, record

    def _labels(self, label: str) -> list[str]:
        """Return the labels of file names; what is the default has none."""
        method, view, against = self.explainer.name, self.style.view, self.explainer.against
        contrast = "" if against is None else f"against-{against}"
        return [label, contrast, "" if method == "dave" else method, "" if view == "map" else view]

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
    picture = read_image(source)
    explainer = with_prompt(explainer, picture, question.prompt)
    classified = classify(explainer.model, picture)
    yield question.target_label, [*refine_classes(explainer, classified, classified.pick(question.target))]


KINDS = {
    "classes": ExplanationKind("classes", ("target",), _explain_classes, has_tiles=True),
    "answer": ExplanationKind("an answer", ("target", "prompt"), _explain_classes),
    "clip": ExplanationKind("a clip", ("target",), explain_clip),
    "sound": ExplanationKind("a sound", ("target",), explain_sound),
    "volume": ExplanationKind("a volume", ("target",), explain_volume),
    "page": ExplanationKind("a page", ("prompt",), explain_page),
    "sentence": ExplanationKind("a sentence", ("prompt",), explain_sentence),
    "words": ExplanationKind("words", ("prompt", "words", "answer", "max_tokens", "together"), explain_answer),
    "score": ExplanationKind("a score", ("score", "prompt"), explain_score),
    "boxes": ExplanationKind("boxes", ("boxes", "threshold", "prompt"), explain_boxes),
}


_KINDS_OF_MODELS: dict[type[Adapter], str] = {
    **{VideoModel: "clip", AudioModel: "sound", VolumeModel: "volume", TextGenerator: "words", PageRetriever: "page"},
    ZeroShotAdapter: "sentence",
}


def _find_kind(model: Adapter, question: Question) -> ExplanationKind:
    """Return the kind of explanation that a question means for a model."""
    named = next((name for kind, name in _KINDS_OF_MODELS.items() if isinstance(model, kind)), None)
    if question.score is not None and named not in ("clip", "sound", "volume"):
        return KINDS["score"]
    if named is not None and (named != "sentence" or question.prompt is not None):
        return KINDS[named]
    if question.boxes or (isinstance(model, TaskModel | TextPrompted) and model.task.default_score == "boxes"):
        return KINDS["boxes"]
    if isinstance(model, TextPrompted):
        return KINDS["answer"]
    return KINDS["score" if isinstance(model, PromptedModel | TaskModel) else "classes"]


def _check_question(kind: ExplanationKind, model: Adapter, question: Question, style: FigureStyle) -> ExplanationKind:
    """Refuse options that a kind of explanation cannot follow."""
    for option, value in asdict(question).items():
        if value not in (None, False) and option not in kind.options:
            how = f"leave --{option.replace('_', '-')} out"
            raise OptionError(f"{model.spec} explains {kind.subject} and takes no {option}; {how}")
    if model.preprocessing.parts is not None and not kind.has_tiles:
        raise OptionError(f"--fit tiles explains classes of pictures, not {kind.subject}; take pad or squash")
    if style.animation and (question.together or kind in (KINDS["clip"], KINDS["volume"])):
        raise OptionError("animations are of one photograph, and that of a clip shows its frames; leave out --animate")
    return kind


def _report_share(report: Callable[[float, str], None], number: int, name: str, share: float) -> None:
    report(number + share, name)


def _animate(stages: Sequence[ImageExplanation], animation: str) -> bytes:
    """Draw how the map of the first target refines."""
    refined = {id(stage.explanation): stage for stage in stages}.values()  # later words leave the first one as it is
    steps = [(stage.explanation.samples, stage.panels[0]) for stage in refined]
    return animate(stages[-1].image, steps, animation)
