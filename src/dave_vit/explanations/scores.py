"""Explain any score of a model's output for a photograph: a region, a box, a value, a similarity."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.ops import box_convert

from dave_vit.data.geometry import Geometry
from dave_vit.data.images import LoadedImage, read_image
from dave_vit.engine.forward import compute_logits
from dave_vit.engine.score_registry import Box
from dave_vit.engine.scores import Detection, parse_score
from dave_vit.engine.targets import Score, ScoreSet, Target
from dave_vit.errors import ImageError, OptionError
from dave_vit.explanations.base import Arrays, ImageExplanation, Labelled
from dave_vit.explanations.explainer import Explainer, Question
from dave_vit.models import Adapter
from dave_vit.models.tasks import NamedScore, PromptedModel, TaskModel
from dave_vit.models.text_generation import TextGenerator
from dave_vit.viz.colors import HUES
from dave_vit.viz.panels import build_panels
from dave_vit.viz.pictures import load_font, overlay_maps
from dave_vit.viz.rendering import Panel, Scales, View, blend, to_pillow

_MOST_BOXES = 5  # that are explained


@dataclass(frozen=True)
class DetectedBox:
    """An object that a detector found.

    Attributes:
        label: index of its class.
        name: name of its class.
        probability: probability of this class.
        corners: (x0, y0, x1, y1) in pixels of the photograph.
    """

    label: int
    name: str
    probability: float
    corners: Box

    @property
    def score(self) -> str:
        """Its score as `--score` takes it."""
        return f"box:{','.join(f'{corner:.1f}' for corner in self.corners)}:{self.label}"


@dataclass(frozen=True)
class ScoreExplanation(ImageExplanation):
    """The map of one score.

    Attributes:
        score_name: the score as `--score` takes it.
        score: the function that was explained.
        value: the value of the score.
        box: the object of a detector that the score is about.
    """

    score_name: str
    score: Score
    value: float
    box: DetectedBox | None = None

    @property
    def caption(self) -> str:
        """The score, or the object that it is about, with its value."""
        what = self.score_name if self.box is None else f"{self.box.name} {self.box.probability:.1%}"
        return f"{what}, {self.value:.4g}"

    @property
    def confidence(self) -> float | None:
        """The probability of the object, where the score is about one."""
        return None if self.box is None else self.box.probability

    @property
    def unit(self) -> str:
        """Parts of the score where the method's maps have a unit."""
        return "score" if super().unit else ""

    @property
    def panels(self) -> list[Panel]:
        """Map, title, error and certainty."""
        return [replace(panel, target=self.caption) for panel in build_panels(self.explanation, unit=self.unit)]

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the map over the photograph, with the box that the score is about."""
        (drawn,) = overlay_maps([self.picture.image], [self.viewed_map(view)], view, scales)
        place = getattr(self.score, "box", None)
        corners = place and self.photo.parts[0].box_to_photo(place) if self.box is None else self.box.corners
        if corners is not None:
            ImageDraw.Draw(drawn).rectangle(corners, outline="white", width=2)
        return drawn

    def details(self) -> dict[str, Any]:
        """The score and its value."""
        return {"score": self.score_name, "value": self.value}


@dataclass(frozen=True)
class JointExplanation(ImageExplanation):
    """Several scores of one photograph, each with a map of its own.

    Attributes:
        parts: the explanations of the scores.
    """

    parts: tuple[ScoreExplanation, ...]

    @classmethod
    def of(cls, parts: Sequence[ScoreExplanation], **fields: Any) -> Self:
        """Return the explanation of several scores together; the other fields are those of the first one."""
        common = {name: getattr(parts[0], name) for name in ("explainer", "picture", "inputs", "explanation")}
        return cls(**common, seconds=sum(part.seconds for part in parts), parts=tuple(parts), **fields)

    @property
    def panels(self) -> list[Panel]:
        """The panel of each score."""
        return [panel for part in self.parts for panel in part.panels]

    def _overlays(self, view: View, scales: Scales) -> list[Image.Image]:
        maps = [part.viewed_map(view) for part in self.parts]
        return overlay_maps([self.picture.image] * len(maps), maps, view, scales)

    def arrays(self) -> Arrays:
        """The map of each score in the frame of the photograph, [H, W]."""
        return {name: part.viewed_map().numpy() for name, part in zip(self._array_names(), self.parts, strict=True)}

    def _array_names(self) -> list[str]:
        return [f"map{number}" for number in range(1, len(self.parts) + 1)]


@dataclass(frozen=True)
class BoxesExplanation(JointExplanation):
    """All objects that a detector found in a photograph, in one picture."""

    @property
    def caption(self) -> str:
        """How many objects there are."""
        return f"all {len(self.parts)} boxes together"

    @property
    def boxes(self) -> list[DetectedBox]:
        """The objects."""
        return [part.box for part in self.parts if part.box is not None]

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the maps over the photograph, a hue for each, with boxes and names in the same hues."""
        maps = [part.viewed_map() for part in self.parts]
        drawn = to_pillow(blend(self.picture.image, maps, shared=scales == "shared"))
        pen = ImageDraw.Draw(drawn)
        for number, box in enumerate(self.boxes):
            colour, (left, top) = HUES[number % len(HUES)], box.corners[:2]
            pen.rectangle(box.corners, outline=colour, width=2)
            text, place = f"{box.name} {box.probability:.0%}", (left + 3, top + 2)
            pen.rectangle(pen.textbbox(place, text, font=load_font()), fill="white")
            pen.text(place, text, fill=colour, font=load_font())
        return drawn

    def details(self) -> dict[str, Any]:
        """The objects."""
        return {"boxes": [{**asdict(box), "score": box.score} for box in self.boxes]}


def refine_score(
    explainer: Explainer, picture: LoadedImage, inputs: Tensor, score: NamedScore, box: DetectedBox | None = None
) -> Iterator[ScoreExplanation]:
    """Yield the explanation of a score after each chunk of samples; methods that draw no samples yield one."""
    name, function = score
    value = float(compute_logits(explainer.model, inputs, Target(score=function).read))
    for explanation, seconds in explainer.refine(inputs, function):
        yield ScoreExplanation(explainer, picture, inputs, explanation, seconds, name, function, value, box)


def refine_scores(
    explainer: Explainer, picture: LoadedImage, inputs: Tensor, scores: Sequence[NamedScore]
) -> Iterator[list[ScoreExplanation]]:
    """Yield the explanations of several scores, which share their forward passes, after each chunk of samples."""
    together = ScoreSet(tuple(function for _, function in scores))
    values = compute_logits(explainer.model, inputs, Target.of(together, 1).read)[0].tolist()
    for explanation, seconds in explainer.refine(inputs, together):
        shared = (explainer, picture, inputs)
        yield [
            ScoreExplanation(*shared, explanation.select_class(index), seconds / len(scores), *score, value)
            for index, (score, value) in enumerate(zip(scores, values, strict=True))
        ]


def detect_boxes(explainer: Explainer, picture: LoadedImage, *, threshold: float = 0.5) -> list[DetectedBox]:
    """Return the objects that a detector finds in a photograph, the likeliest first.

    Args:
        explainer: holds the detector.
        picture: the photograph.
        threshold: the least probability.
    """
    model = explainer.model
    with torch.no_grad():
        output: Any = model(model.preprocess(picture.image))
    if not isinstance(getattr(output, "pred_boxes", None), Tensor):
        raise OptionError(f"{model.spec} finds no boxes; --boxes is for detectors")
    geometry = Geometry.measure(model.preprocessing, picture.image.size)
    corners = box_convert(output.pred_boxes[0], "cxcywh", "xyxy").tolist()
    best, labels = _class_probabilities(output.logits[0], len(model.class_names)).max(-1)  # [queries]
    order = [index for index in best.argsort(descending=True).tolist() if best[index] >= threshold][:_MOST_BOXES]
    classes, names = labels.tolist(), model.class_names
    return [
        DetectedBox(classes[index], names[classes[index]], float(best[index]), geometry.box_to_photo(corners[index]))
        for index in order
    ]


def explain_score(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    """Yield the explanation of a score."""
    picture = read_image(source)
    explainer = with_prompt(explainer, picture, question.prompt)
    score = _find_score(explainer.model, picture, question.score)
    yield score[0], [*refine_score(explainer, picture, explainer.model.preprocess(picture.image), score)]


def with_prompt(explainer: Explainer, picture: LoadedImage, prompt: str | None) -> Explainer:
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


def explain_boxes(explainer: Explainer, source: str, question: Question) -> Iterator[Labelled]:
    """Yield one explanation per object that a detector finds, then one of all objects together."""
    picture, threshold = read_image(source), 0.5 if question.threshold is None else question.threshold
    explainer = with_prompt(explainer, picture, question.prompt)
    boxes = detect_boxes(explainer, picture, threshold=threshold)
    if not boxes:
        raise ImageError(f"no box of {picture.name} is as likely as {threshold:g}; lower it with --threshold")
    model, parts = explainer.model, []
    inputs, geometry = model.preprocess(picture.image), Geometry.measure(model.preprocessing, picture.image.size)
    for number, box in enumerate(boxes, 1):
        score = box.score, Detection(box.label, geometry.box_to_input(box.corners))
        stages = list(refine_score(explainer, picture, inputs, score, box))
        parts.append(stages[-1])
        yield f"box{number}", stages
    yield "boxes", [BoxesExplanation.of(parts)]


def _class_probabilities(logits: Tensor, classes: int) -> Tensor:
    """Return [queries, classes]; DETR's last logit stands for no object, others judge each class by itself."""
    return logits.softmax(-1)[..., :-1] if logits.shape[-1] == classes + 1 else logits.sigmoid()
