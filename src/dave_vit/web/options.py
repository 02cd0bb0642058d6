"""What a request for a map may ask for, declared once.

The request schema is `ExplainQuery`. The form of the page (`form_options`) and the equivalent command line
(`command_arguments`) are read from the same fields: a new option is one field with a `FormField`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from dave_vit.errors import OptionError
from dave_vit.methods import METHODS
from dave_vit.methods.options import declared_options, max_samples
from dave_vit.methods.presets import PRESETS, Preset
from dave_vit.neighborhood.views import NoiseKind
from dave_vit.reduce import REDUCERS
from dave_vit.web.schema import FormOption, ImageQuery, Limits

_SET = "--set"  # takes name=value, for options of a method that have no flag of their own


@dataclass(frozen=True)
class FormField:
    """How a field of a request appears in the form and on the command line.

    Attributes:
        flag: of `dave explain`; empty where the model's preprocessing brings it.
        label: in the form; empty where the page asks in another way, such as by a click on a class.
        section: id of the element of the page that holds it.
        choices: names to choose among, where a registry has them; the page fills in others, such as classes.
        preset_value: the value that a preset gives it.
        of_method: whether it is an option of the method; others say what is explained, and with which method.
    """

    flag: str
    label: str = ""
    section: str = "more-options"
    choices: Callable[[], Iterable[str]] | None = None
    preset_value: Callable[[Preset], int | float | str] | None = None
    of_method: bool = True

    def __call__(self, schema: dict[str, Any]) -> None:
        """Add the flag to the OpenAPI description of the field, as pydantic's `json_schema_extra`."""
        schema["x-flag"] = self.flag


def _option(description: str, form: FormField, default: Any = None, **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra=form, **limits)


def _subject(flag: str, label: str = "", section: str = "") -> FormField:
    """A field that says what is explained."""
    return FormField(flag, label, section, of_method=False)


class ExplainQuery(ImageQuery):
    """What to explain, and how. Options that the method does not take are an error."""

    target: str = _option(
        "name, part of a name or index of a class, or top1 to top5", _subject("--target"), "top1", max_length=200
    )
    against: str | None = _option(
        "the class to compare with, rivals, or none; the method decides by default",
        _subject("--against", "Against", "options"),
        max_length=200,
    )
    prompt: str = _option("the question that was answered", _subject("--prompt"), "", max_length=1000)
    word: int | None = _option(
        "number of the word of the answer to explain instead of a class, counted from 1", _subject("--words"), ge=1
    )
    fit: Literal["crop", "pad", "squash"] | None = _option(
        "how to fit the image into the model's input: crop the middle, pad or squash; the model's own by default",
        FormField("", "Fit", "fit-field", lambda: ("", "crop", "pad", "squash"), of_method=False),
    )
    answer: str | None = Field(None, max_length=4000, description="the answer, as /api/generate returned it")
    method: str = _option(
        "name of the method",
        FormField("--method", "Method", "method-field", lambda: method_names(), of_method=False),
        "dave",
    )
    samples: int | None = _option(
        "number of perturbed copies of the image",
        FormField("--samples", "Samples", "options", preset_value=lambda preset: preset.samples),
        ge=1,
    )
    preset: str | None = _option(
        "named set of all further options of DAVE", FormField("--preset", "Preset", choices=lambda: PRESETS)
    )
    noise: NoiseKind | None = _option(
        "kind of the noise; the preset's by default",
        FormField(_SET, "Noise", preset_value=lambda preset: preset.neighborhood.noise.kind),
    )
    noise_level: float | None = _option(
        "level of the noise; the preset's by default",
        FormField(_SET, "Noise level", preset_value=lambda preset: preset.neighborhood.noise.level),
        ge=0,
    )
    reducer: str | None = _option(
        "estimator; the preset's by default",
        FormField(_SET, "Estimator", choices=lambda: REDUCERS, preset_value=lambda preset: _reducer_name(preset)),
    )
    seed: int = _option("of the noise", FormField("--seed", "Seed"), 0, ge=0, lt=2**31)
    stream: bool = Field(True, description="send every step as a server-sent event, or only the last step")


FIELDS: Mapping[str, FormField] = {
    name: field.json_schema_extra
    for name, field in ExplainQuery.model_fields.items()
    if isinstance(field.json_schema_extra, FormField)
}


def form_options(limits: Limits, seed: int) -> list[FormOption]:
    """Return the fields of the page's form, in their order."""
    properties = ExplainQuery.model_json_schema()["properties"]
    defaults: dict[str, int | str] = {"method": "dave", "preset": "default", "seed": seed}
    options = []
    for name, field in FIELDS.items():
        if field.label:
            schema = properties[name].get("anyOf", [properties[name]])[0]  # the second of an optional field is null
            options.append(
                FormOption(
                    name=name,
                    label=field.label,
                    section=field.section,
                    type=schema["type"],
                    minimum=schema.get("minimum"),
                    maximum=limits.samples if name == "samples" else None,
                    choices=list(field.choices()) if field.choices else schema.get("enum", []),
                    default=defaults.get(name),
                    of_method=field.of_method,
                    of_preset=field.preset_value is not None,
                )
            )
    return options


def method_names() -> list[str]:
    """Return the names of all methods, DAVE first."""
    return sorted(METHODS, key=lambda name: name != "dave")


def preset_values(preset: Preset) -> dict[str, int | float | str]:
    """Return the values that a preset gives to options of the form."""
    return {name: field.preset_value(preset) for name, field in FIELDS.items() if field.preset_value}


def accepted_options(method: str) -> list[str]:
    """Return the options of the form that a method takes."""
    known = declared_options(method)
    settings = {name for name, field in FIELDS.items() if field.flag == _SET}  # all of them belong to a preset
    names = [name for name, field in FIELDS.items() if field.of_method and name in known]
    return [name for name in names if name not in settings or settings <= known.keys()]


def method_options(query: ExplainQuery, limit: int) -> dict[str, Any]:
    """Return the options of the method that a request sets, checked; at most `limit` samples."""
    accepted = accepted_options(query.method)
    names = {name for name, field in FIELDS.items() if field.of_method and name != "seed"}
    options = query.model_dump(include=names, exclude_none=True)
    for name in options:
        if name not in accepted:
            raise OptionError(f"method {query.method!r} takes no {name}; leave it out")
    if query.preset is not None:
        PRESETS[query.preset]  # a name and never a file: the command line takes paths, a request must not
    samples = max_samples(query.method, options) if "preset" in accepted else options.get("samples", 0)
    if samples > limit:
        raise OptionError(f"{samples} samples; this server takes at most {limit}")
    return options | ({"seed": query.seed} if "seed" in accepted else {})


def command_arguments(query: ExplainQuery) -> list[str]:
    """Return the arguments of `dave explain` that stand for a request, without its image and model."""
    accepted = accepted_options(query.method)
    arguments = []
    for name, field in FIELDS.items():
        value = getattr(query, name)
        if field.flag and value not in (None, "") and (name in accepted or not field.of_method):
            arguments += [field.flag, f"{name}={value}" if field.flag == _SET else str(value)]
    return arguments


def _reducer_name(preset: Preset) -> str:
    return next(name for name in REDUCERS if type(preset.reducer) is REDUCERS[name])
