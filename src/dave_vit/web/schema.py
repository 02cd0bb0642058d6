"""What the API takes and returns; requests for maps are in `options`."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dave_vit.explanations.classes import Prediction
from dave_vit.explanations.evidence import Part
from dave_vit.methods import MethodInfo
from dave_vit.viz import scale_map
from dave_vit.viz.rendering import MapLike, as_map


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

    model: Annotated[str | None, Field(description="one of the server's models; its first one by default")] = None
    name: Annotated[str, Field(max_length=200, description="file name of the image")] = "image.png"
    fit: Annotated[
        Literal["crop", "pad", "squash"] | None, Field(description="how to fit the image into the model's input")
    ] = None


class ClassifyQuery(ImageQuery):
    """Request to classify an image."""

    also: Annotated[list[int], Field(max_length=20, description="classes to return beside the likeliest")] = []


class AnswerQuery(ImageQuery):
    """Request for the text that a model writes about an image."""

    prompt: Annotated[str, Field(max_length=1000, description="the question; none for captioners")] = ""


class SourcesQuery(AnswerQuery):
    """Request for where the words of an answer come from."""

    answer: Annotated[str, Field(max_length=4000, description="the answer, as /api/generate returned it")]


class ClassCandidate(BaseModel):
    """A class that an ambiguous name may mean."""

    index: int
    name: str


class Failure(BaseModel):
    """What went wrong, in one line."""

    error: str
    candidates: Annotated[list[ClassCandidate], Field(description="classes that an ambiguous name may mean")] = []


class Verdict(BaseModel):
    """What `dave doctor` says about a model."""

    exact: bool
    text: str


class ModelCard(BaseModel):
    """A model of this server."""

    name: str
    classes: int
    writes: Annotated[bool, Field(description="whether it writes text instead of classifying")]
    prompts: Annotated[bool, Field(description="whether it takes a prompt")]
    knows: Annotated[str, Field(description="what it was trained for")]
    examples: Annotated[list[str], Field(description="addresses of example images")]
    presets: Annotated[dict[str, dict[str, int | float | str]], Field(description="values of options by preset")]


@dataclass(frozen=True, kw_only=True)
class MethodCard(MethodInfo):
    """A method, and which of the options it takes."""

    name: str
    takes: list[str]


class FormOption(BaseModel):
    """A field of the form of the page, which is a parameter of `/api/explain`."""

    name: str
    label: str
    section: Annotated[str, Field(description="id of the element that holds it")]
    type: Literal["string", "integer", "number"]
    minimum: float | None
    maximum: float | None
    choices: Annotated[list[str], Field(description="values of a string; empty where they depend on the image")]
    default: Annotated[int | str | None, Field(description="null where it depends on the preset")]
    of_method: Annotated[bool, Field(description="whether it is an option of the method")]
    of_preset: Annotated[bool, Field(description="whether presets set it")]


class Info(BaseModel):
    """Everything there is to choose from."""

    version: str
    models: list[ModelCard]
    methods: list[MethodCard]
    options: list[FormOption]
    limits: Limits
    seed: int
    colormaps: Annotated[dict[str, list[str]], Field(description="256 colours each, from low to high")]


class Classification(BaseModel):
    """What a model predicts for an image, and the image as the model sees it."""

    name: str
    top5: list[Prediction]
    also: Annotated[list[Prediction], Field(description="the other requested classes")]
    picture: Annotated[str, Field(description="PNG in base64: the image after preprocessing")]
    crop: Annotated[
        tuple[float, float, float, float],
        Field(description="left, top, right and bottom of that in the photograph, from 0 to 1"),
    ]
    notes: Annotated[list[str], Field(description="changes made to the image before the model sees it")]


class Answer(BaseModel):
    """What a model writes about an image."""

    name: str
    answer: str
    words: list[str]
    picture: Annotated[str, Field(description="PNG in base64: the image, in the size of the maps")]
    notes: list[str]


class Sources(BaseModel):
    """Parts of a word's score against its rivals, averaged over views of the image; they add up to the score."""

    score: float
    image: Part
    prompt: Part
    answer: Annotated[Part, Field(description="the words of the answer before")]
    constants: Annotated[Part, Field(description="the model's biases and positions")]
    image_share: Annotated[float, Field(description="of the image in the sizes of all parts, from -1 to 1")]
    grounded: Annotated[bool, Field(description="whether the image's part exceeds zero by two standard errors")]


class TracedWord(BaseModel):
    """A word of an answer, and where it comes from."""

    text: str
    probability: Annotated[float, Field(description="given the image, the prompt and the words before")]
    sources: Annotated[Sources | None, Field(description="null where the model cannot be decomposed exactly")]


class Queued(BaseModel):
    """Sent while there is nothing new: how many requests run before this one; 0 when it is running."""

    ahead: int


class Plane(BaseModel):
    """One number per pixel, row by row."""

    data: Annotated[str, Field(description="16-bit signed integers, little endian, in base64")]
    unit: Annotated[float, Field(description="the number that 1 stands for")]
    limit: Annotated[float, Field(description="the number shown in the brightest colour")]
    caption: Annotated[str, Field(description="how the limit was computed")]

    @classmethod
    def encode(cls, values: MapLike, *, signed: bool = False) -> Plane:
        """Encode a map [H, W]."""
        array, scaled = as_map(values).numpy(), scale_map(values, signed=signed)
        unit = float(np.abs(array).max()) / 32767 or 1.0
        data = base64.b64encode((array / unit).round().astype("<i2").tobytes()).decode()
        return cls(data=data, unit=unit, limit=scaled.limit, caption=scaled.caption)


class Finished(BaseModel):
    """The files of a result, and the command line that reproduces it."""

    token: Annotated[str, Field(description="identifies the result while it is kept")]
    files: Annotated[dict[str, str], Field(description="addresses by the ending of the file name")]
    command: Annotated[str, Field(description="the command line that makes the same result")]


class ExplainStep(BaseModel):
    """The map after some samples."""

    target: Prediction
    against: Annotated[str | None, Field(description='the class it is compared with, or "rivals"')]
    method: str
    samples: int
    total: int
    seconds: float
    width: int
    height: int
    unit: Annotated[str, Field(description="of map, signed and standard_error; empty where it is the method's own")]
    notes: Annotated[list[str], Field(description="warnings about the result, in the last step")] = []
    map: Annotated[Plane, Field(description="evidence for the target")]
    signed: Annotated[Plane, Field(description="evidence for the target, and against it below zero")]
    standard_error: Annotated[Plane | None, Field(description="of methods that draw samples")] = None
    certainty: Annotated[Plane | None, Field(description="standard errors between a pixel's average and zero")] = None
    finished: Annotated[Finished | None, Field(description="in the last step")] = None
