"""What the API takes and gives."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dave_vit.explain.classes import Prediction
from dave_vit.neighborhood.noise import NoiseKind
from dave_vit.viz import ScaledMap
from dave_vit.viz.rendering import MapLike, as_map


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and what the server keeps.

    Attributes:
        bytes: of an upload.
        pixels: of an image, whatever the size of its file.
        samples: of a method.
        waiting: requests behind the one that is worked on; one more is answered with "busy".
        results: of the latest requests, kept for downloads.
    """

    bytes: int = 20_000_000
    pixels: int = 40_000_000
    samples: int = 500
    waiting: int = 4
    results: int = 16


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: Annotated[str | None, Field(description="one of the server's models; its first one by default")] = None
    name: Annotated[str, Field(max_length=200, description="what the file is called")] = "image.png"


class LookQuery(_Query):
    """What to classify an image with."""

    also: Annotated[list[int], Field(max_length=20, description="classes to tell of beside the likeliest")] = []


class AskQuery(_Query):
    """What to ask a model that writes."""

    prompt: Annotated[str, Field(max_length=1000, description="the question; none for captioners")] = ""


class ExplainQuery(_Query):
    """What to explain, and how. Options that the method does not take are an error."""

    target: Annotated[str, Field(max_length=200, description="name, part of a name or index, or top1 to top5")] = "top1"
    against: Annotated[
        str | None, Field(max_length=200, description="rivals, or a class; none for the class by itself")
    ] = None
    word: Annotated[int | None, Field(ge=1, description="of an answer, counted from 1, in the place of a class")] = None
    prompt: Annotated[str, Field(max_length=1000, description="the question that was answered")] = ""
    answer: Annotated[str | None, Field(max_length=4000, description="the answer, as it was given before")] = None
    method: Annotated[str, Field(description="one of the methods")] = "dave"
    samples: Annotated[int | None, Field(ge=1, description="perturbed copies of the image")] = None
    preset: Annotated[str | None, Field(description="all further options of DAVE taken together")] = None
    noise: Annotated[NoiseKind | None, Field(description="kind of the noise, where it is not the preset's")] = None
    noise_level: Annotated[float | None, Field(ge=0, description="where it is not the preset's")] = None
    reducer: Annotated[str | None, Field(description="estimator, where it is not the preset's")] = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stream: Annotated[bool, Field(description="every step as it comes (server-sent events), or the last one")] = True


class Candidate(BaseModel):
    """A class that may have been meant."""

    index: int
    name: str


class Failure(BaseModel):
    """What went wrong, in one line."""

    error: str
    candidates: Annotated[list[Candidate], Field(description="classes that may have been meant")] = []


class PresetCard(BaseModel):
    """What a preset of DAVE means for a model."""

    samples: int
    noise: str
    noise_level: float
    reducer: str


class Verdict(BaseModel):
    """What the doctor says of a model."""

    exact: bool
    text: str


class ModelCard(BaseModel):
    """A model of this server."""

    name: str
    classes: int
    writes: Annotated[bool, Field(description="whether it writes words, in the place of classes")]
    prompts: Annotated[bool, Field(description="whether it takes a prompt")]
    knows: Annotated[str, Field(description="what it was made for")]
    examples: Annotated[list[str], Field(description="addresses of images that fit it")]
    presets: dict[str, PresetCard]


class MethodCard(BaseModel):
    """A method, and which of the options it takes."""

    name: str
    summary: str
    paper: str
    passes: str
    resolution: str
    class_specific: bool
    unit: str
    takes: list[str]


class Info(BaseModel):
    """All there is to choose from."""

    version: str
    models: list[ModelCard]
    methods: list[MethodCard]
    reducers: list[str]
    noises: list[str]
    limits: Limits
    seed: int
    colormaps: Annotated[dict[str, list[str]], Field(description="256 colours each, from low to high")]


class Look(BaseModel):
    """An image as the model sees it."""

    name: str
    top5: list[Prediction]
    also: Annotated[list[Prediction], Field(description="the other classes that were asked for")]
    picture: Annotated[str, Field(description="PNG in base64: the image after preprocessing")]
    notes: Annotated[list[str], Field(description="what was done to the image that may surprise")]


class Answer(BaseModel):
    """What a model writes about an image."""

    name: str
    answer: str
    words: list[str]
    picture: Annotated[str, Field(description="PNG in base64: the image, in the size of the maps")]
    notes: list[str]


class Queued(BaseModel):
    """While there is nothing new: how many requests are before this one; 0 where it is being worked on."""

    ahead: int


class Plane(BaseModel):
    """Numbers of each pixel, row by row."""

    data: Annotated[str, Field(description="16-bit signed integers, little endian, in base64")]
    unit: Annotated[float, Field(description="the number that 1 stands for")]
    limit: Annotated[float, Field(description="the number shown in the brightest colour")]
    caption: Annotated[str, Field(description="how the limit was found")]


def plane(values: MapLike, scaled: ScaledMap) -> Plane:
    """A map as the API gives it."""
    array = as_map(values).numpy()
    unit = float(np.abs(array).max()) / 32767 or 1.0
    data = (array / unit).round().astype("<i2").tobytes()
    return Plane(data=base64.b64encode(data).decode(), unit=unit, limit=scaled.limit, caption=scaled.caption)


class Finished(BaseModel):
    """What can be taken away in the end."""

    token: Annotated[str, Field(description="names the result while it is kept")]
    files: Annotated[dict[str, str], Field(description="addresses by the ending of the file's name")]
    command: Annotated[str, Field(description="the command line that makes the same result")]


class Step(BaseModel):
    """The map after some samples."""

    target: Prediction
    against: Annotated[str | None, Field(description='the class that it is set against, or "rivals"')]
    method: str
    samples: int
    total: int
    seconds: float
    width: int
    height: int
    unit: Annotated[str, Field(description="of map, signed and standard_error; empty where it is the method's own")]
    notes: Annotated[list[str], Field(description="what a reader has to know, in the last step")] = []
    map: Annotated[Plane, Field(description="what speaks for the target")]
    signed: Annotated[Plane, Field(description="that with what speaks against it, below zero")]
    standard_error: Annotated[Plane | None, Field(description="of methods that draw samples")] = None
    sureness: Annotated[Plane | None, Field(description="standard errors between a pixel's average and zero")] = None
    finished: Annotated[Finished | None, Field(description="in the last step")] = None
