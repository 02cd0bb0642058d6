"""What the API takes and returns, and results in its form; requests for maps are in `options`."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dave_vit.explanations.classes import ClassExplanation, Prediction
from dave_vit.explanations.evidence import Part, WordEvidence
from dave_vit.explanations.words import WordExplanation
from dave_vit.methods import MethodInfo
from dave_vit.models.prepare import Fit
from dave_vit.models.text_generation import AnsweredPrompt
from dave_vit.viz.figures import MAX_CERTAINTY
from dave_vit.viz.rendering import MapLike, Panel, as_map, scale_map

_LONGER_SIDE = 640  # pixels of what the page shows for models that write


@dataclass(frozen=True)
class Limits:
    """Limits of one request, and of what the server keeps.

    Attributes:
        bytes: of an upload.
        pixels: of an image, whatever the size of its file.
        samples: of a method.
        waiting: number of requests that wait behind the running one; one more is answered with "busy".
        results: number of latest results that are kept for downloads.
    """

    bytes: int = 20_000_000
    pixels: int = 40_000_000
    samples: int = 500
    waiting: int = 4
    results: int = 16


class ImageQuery(BaseModel):
    """Parameters of every request whose body is an image."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="one of the server's models; its first one by default")
    name: str = Field("image.png", max_length=200, description="file name of the image")
    fit: Fit | None = Field(None, description="how to fit the image into the model's input; the model's own by default")


class ClassifyQuery(ImageQuery):
    """Request to classify an image."""

    also: list[int] = Field([], max_length=20, description="classes to return beside the likeliest")


class AnswerQuery(ImageQuery):
    """Request for the text that a model writes about an image."""

    prompt: str = Field("", max_length=1000, description="the question; none for captioners")


class SourcesQuery(AnswerQuery):
    """Request for where the words of an answer come from."""

    answer: str = Field(max_length=4000, description="the answer, as /api/generate returned it")


class ClassCandidate(BaseModel):
    """A class that an ambiguous name may mean."""

    index: int
    name: str


class Failure(BaseModel):
    """What went wrong, in one line."""

    error: str
    candidates: list[ClassCandidate] = Field([], description="classes that an ambiguous name may mean")


class Verdict(BaseModel):
    """What `dave doctor` says about a model."""

    exact: bool
    text: str


class ModelCard(BaseModel):
    """A model of this server."""

    name: str
    classes: int
    writes: bool = Field(description="whether it writes text instead of classifying")
    prompts: bool = Field(description="whether it takes a prompt")
    knows: str = Field(description="what it was trained for")
    examples: list[str] = Field(description="addresses of example images")
    presets: dict[str, dict[str, int | float | str]] = Field(description="values of options by preset")


@dataclass(frozen=True, kw_only=True)
class MethodCard(MethodInfo):
    """A method, and which of the options it takes."""

    name: str
    takes: list[str]


class FormOption(BaseModel):
    """A field of the form of the page, which is a parameter of `/api/explain`."""

    name: str
    label: str
    section: str = Field(description="id of the element that holds it")
    type: Literal["string", "integer", "number"]
    minimum: float | None
    maximum: float | None
    choices: list[str] = Field(description="values of a string; empty where they depend on the image")
    default: int | str | None = Field(description="null where it depends on the preset")
    of_method: bool = Field(description="whether it is an option of the method")
    of_preset: bool = Field(description="whether presets set it")


class Info(BaseModel):
    """Everything there is to choose from."""

    version: str
    models: list[ModelCard]
    methods: list[MethodCard]
    options: list[FormOption]
    limits: Limits
    seed: int
    colormaps: dict[str, list[str]] = Field(description="256 colours each, from low to high")


class Classification(BaseModel):
    """What a model predicts for an image, and the image as the model sees it."""

    name: str
    top5: list[Prediction]
    also: list[Prediction] = Field(description="the other requested classes")
    picture: str = Field(description="PNG in base64: the image after preprocessing")
    crop: tuple[float, float, float, float] = Field(
        description="left, top, right and bottom of that in the photograph, from 0 to 1"
    )
    notes: list[str] = Field(description="changes made to the image before the model sees it")


class Answer(BaseModel):
    """What a model writes about an image."""

    name: str
    answer: str
    words: list[str]
    picture: str = Field(description="PNG in base64: the image, in the size of the maps")
    notes: list[str]


class Sources(BaseModel):
    """Parts of a word's score against its rivals, averaged over views of the image; they add up to the score."""

    score: float
    image: Part
    prompt: Part
    answer: Part = Field(description="the words of the answer before")
    constants: Part = Field(description="the model's biases and positions")
    image_share: float = Field(description="of the image in the sizes of all parts, from -1 to 1")
    grounded: bool = Field(description="whether the image's part exceeds zero by two standard errors")


class TracedWord(BaseModel):
    """A word of an answer, and where it comes from."""

    text: str
    probability: float = Field(description="given the image, the prompt and the words before")
    sources: Sources | None = Field(description="null where the model cannot be decomposed exactly")


class Queued(BaseModel):
    """Sent while there is nothing new: how many requests run before this one; 0 when it is running."""

    ahead: int


class Plane(BaseModel):
    """One number per pixel, row by row."""

    data: str = Field(description="16-bit signed integers, little endian, in base64")
    unit: float = Field(description="the number that 1 stands for")
    limit: float = Field(description="the number shown in the brightest colour")
    caption: str = Field(description="how the limit was computed")

    @classmethod
    def encode(cls, values: MapLike, *, signed: bool = False) -> "Plane":
        """Encode a map [H, W]."""
        array, scaled = as_map(values).numpy(), scale_map(values, signed=signed)
        unit = float(np.abs(array).max()) / 32767 or 1.0
        data = base64.b64encode((array / unit).round().astype("<i2").tobytes()).decode()
        return cls(data=data, unit=unit, limit=scaled.limit, caption=scaled.caption)


class Finished(BaseModel):
    """The files of a result, and the command line that reproduces it."""

    token: str = Field(description="identifies the result while it is kept")
    files: dict[str, str] = Field(description="addresses by the ending of the file name")
    command: str = Field(description="the command line that makes the same result")


class ExplainStep(BaseModel):
    """The map after some samples."""

    target: Prediction
    against: str | None = Field(description='the class it is compared with, or "rivals"')
    method: str
    samples: int
    total: int
    seconds: float
    width: int
    height: int
    unit: str = Field(description="of map, signed and standard_error; empty where it is the method's own")
    notes: list[str] = Field([], description="warnings about the result, in the last step")
    map: Plane = Field(description="evidence for the target")
    signed: Plane = Field(description="evidence for the target, and against it below zero")
    standard_error: Plane | None = Field(None, description="of methods that draw samples")
    certainty: Plane | None = Field(None, description="standard errors between a pixel's average and zero")
    finished: Finished | None = Field(None, description="in the last step")


def class_step(result: ClassExplanation) -> ExplainStep:
    """Return the map of a class, after as many samples as there are."""
    panel, against = (result.panels if len(result.inputs) == 1 else result.photo_panels)[0], result.against
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
    explanation, answered = word.explanation, result.answered
    text, probability = answered.words[number - 1].text, answered.probabilities()[number - 1]
    geometry = word.photo.parts[0].resize_photo(display_size(word.photo.image.size))
    maps: dict[str, Any] = {  # [1, H', W'] of the input -> [H, W] of what the page shows
        name: geometry.to_photo(values[0].detach().float().cpu())
        for name in ("map", "standard_error", "signed", "certainty")
        if (values := getattr(explanation, name)) is not None
    }
    return _build_step(
        Panel(target=word.score_name, unit="logit" if word.unit else "", **maps),
        target=Prediction(number, text, probability, word.value),
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
