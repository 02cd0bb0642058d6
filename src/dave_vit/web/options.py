"""What a request for a map may ask for, and what there is to choose from.

The request is an `ExplainQuery`. The form of the page and the equivalent command line are read from `FIELDS`: a new
option is a field of the one and an entry of the other.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, get_args

from pydantic import Field

from dave_vit._version import __version__
from dave_vit.errors import OptionError
from dave_vit.methods import METHODS
from dave_vit.methods.options import declared_options, max_samples
from dave_vit.methods.presets import PRESETS, Preset
from dave_vit.models import Adapter
from dave_vit.models.adapter import domain_advice
from dave_vit.models.prepare import Fit
from dave_vit.models.text_generation import TextGenerator
from dave_vit.neighborhood.views import NoiseKind
from dave_vit.reduce import REDUCERS
from dave_vit.viz.colors import hex_colormaps
from dave_vit.web.images import EXAMPLES, PHOTOS
from dave_vit.web.schema import FormOption, ImageQuery, Info, Limits, MethodCard, ModelCard

_SET = "--set"  # takes name=value, for options of a method that have no flag of their own
_SUBJECT = {"target", "against", "prompt", "word", "fit", "method"}  # all other fields are options of the method


class ExplainQuery(ImageQuery):
    """What to explain, and how. Options that the method does not take are an error."""

    target: str = Field("top1", max_length=200, description="name, part of a name or index of a class, or top1 to top5")
    against: str | None = Field(
        None, max_length=200, description="the class to compare with, rivals, or none; the method decides by default"
    )
    prompt: str = Field("", max_length=1000, description="the question that was answered")
    word: int | None = Field(
        None, ge=1, description="number of the word of the answer to explain instead of a class, counted from 1"
    )
    answer: str | None = Field(None, max_length=4000, description="the answer, as /api/generate returned it")
    method: str = Field("dave", description="name of the method")
    samples: int | None = Field(None, ge=1, description="number of perturbed copies of the image")
    preset: str | None = Field(None, description="named set of all further options of DAVE")
    noise: NoiseKind | None = Field(None, description="kind of the noise; the preset's by default")
    noise_level: float | None = Field(None, ge=0, description="level of the noise; the preset's by default")
    reducer: str | None = Field(None, description="estimator; the preset's by default")
    seed: int = Field(0, ge=0, lt=2**31, description="of the noise")
    stream: bool = Field(True, description="send every step as a server-sent event, or only the last step")


def _reducer_name(preset: Preset) -> str:
    return next(name for name in REDUCERS if type(preset.reducer) is REDUCERS[name])


@dataclass(frozen=True)
class FormField:
    """How a field of a request appears in the form and on the command line.

    Attributes:
        flag: of `dave explain`; empty where the model's preprocessing brings it.
        label: in the form; empty where the page asks in another way, such as by a click on a class.
        section: id of the element of the page that holds it.
        choices: names to choose among, where a registry has them; the page fills in others, such as classes.
        preset_value: the value that a preset gives it.
    """

    flag: str
    label: str = ""
    section: str = "more-options"
    choices: Iterable[str] = ()
    preset_value: Callable[[Preset], int | float | str] | None = None


FIELDS = {
    "fit": FormField("", "Fit", "fit-field", ("", *get_args(Fit))),
    "target": FormField("--target"),
    "against": FormField("--against", "Against", "options"),
    "prompt": FormField("--prompt"),
    "word": FormField("--words"),
    "method": FormField("--method", "Method", "method-field", METHODS),
    "samples": FormField("--samples", "Samples", "options", preset_value=attrgetter("samples")),
    "preset": FormField("--preset", "Preset", choices=PRESETS),
    "noise": FormField(_SET, "Noise", preset_value=attrgetter("neighborhood.noise.kind")),
    "noise_level": FormField(_SET, "Noise level", preset_value=attrgetter("neighborhood.noise.level")),
    "reducer": FormField(_SET, "Estimator", choices=REDUCERS, preset_value=_reducer_name),
    "seed": FormField("--seed", "Seed"),
}


def build_info(models: Sequence[Adapter], limits: Limits, seed: int) -> Info:
    """Return what the page needs before its first request."""
    return Info(
        version=__version__,
        models=[_describe_model(model) for model in models],
        methods=[MethodCard(name=name, takes=accepted_options(name), **asdict(METHODS[name].info)) for name in METHODS],
        options=list(_form_options(limits, seed)),
        limits=limits,
        seed=seed,
        colormaps=hex_colormaps(),
    )


def _describe_model(model: Adapter) -> ModelCard:
    writes, domain = isinstance(model, TextGenerator), domain_advice(model, "dave serve ")
    if writes:
        knows = "This model writes about images; each word has a map." + (f" It {domain}" if domain else "")
    else:
        knows = f"This model {domain or f'knows {len(model.class_names)} classes.'}"
    return ModelCard(
        name=model.spec,
        classes=len(model.class_names),
        writes=writes,
        prompts=isinstance(model, TextGenerator) and model.processor is not None,
        knows=knows,
        examples=[f"/api/examples/{name}.png" for name in (EXAMPLES if domain else PHOTOS)],
        presets={name: _preset_values(PRESETS[name](model)) for name in PRESETS},
    )


def _preset_values(preset: Preset) -> dict[str, int | float | str]:
    return {option: field.preset_value(preset) for option, field in FIELDS.items() if field.preset_value}


def _form_options(limits: Limits, seed: int) -> Iterator[FormOption]:
    """Yield the fields of the page's form, in their order."""
    properties = ExplainQuery.model_json_schema()["properties"]
    defaults: dict[str, int | str] = {"method": "dave", "preset": "default", "seed": seed}
    for name, field in FIELDS.items():
        if not field.label:
            continue
        schema = properties[name].get("anyOf", [properties[name]])[0]  # the second of an optional field is null
        yield FormOption(
            name=name,
            label=field.label,
            section=field.section,
            type=schema["type"],
            minimum=schema.get("minimum"),
            maximum=limits.samples if name == "samples" else None,
            choices=list(field.choices) or schema.get("enum", []),
            default=defaults.get(name),
            of_method=name not in _SUBJECT,
            of_preset=field.preset_value is not None,
        )


def accepted_options(method: str) -> list[str]:
    """Return the options of the form that a method takes."""
    known = declared_options(method)
    settings = {name for name, field in FIELDS.items() if field.flag == _SET}  # all of them belong to a preset
    names = [name for name in FIELDS if name in known and name not in _SUBJECT]
    return [name for name in names if name not in settings or settings <= known.keys()]


def method_options(query: ExplainQuery, limit: int) -> dict[str, Any]:
    """Return the options of the method that a request sets, checked; at most `limit` samples."""
    accepted = accepted_options(query.method)
    options = query.model_dump(include=FIELDS.keys() - _SUBJECT - {"seed"}, exclude_none=True)
    for name in options:
        if name not in accepted:
            raise OptionError(f"method {query.method!r} takes no {name}; leave it out")
    if query.preset is not None:
        PRESETS[query.preset]  # a name and never a file: the command line takes paths, a request must not
    samples = max_samples(query.method, options) if "preset" in accepted else options.get("samples", 0)
    if samples > limit:
        raise OptionError(f"{samples} samples; this server takes at most {limit}")
    return options | ({"seed": query.seed} if "seed" in accepted else {})


def command_arguments(query: ExplainQuery) -> Iterator[str]:
    """Yield the arguments of `dave explain` that stand for a request, without its image and model."""
    accepted = accepted_options(query.method)
    for name, field in FIELDS.items():
        value = getattr(query, name)
        if field.flag and value not in (None, "") and (name in accepted or name in _SUBJECT):
            yield from (field.flag, f"{name}={value}" if field.flag == _SET else str(value))
