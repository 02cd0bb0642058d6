"""Options that several commands share, each declared once, and groups of them.

A group is a dataclass whose fields are options as typer declares them. A command names groups in its signature, and
`expand_groups` lets typer see the fields instead of the group:

    @app.command()
    def explain(images: Images, model: ModelOptions, method: MethodOptions) -> None: ...

A parameter's default is a group with other defaults: `model: ModelOptions = ModelOptions(device="cpu")`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from dave_vit.errors import OptionError

if TYPE_CHECKING:
    from dave_vit.evaluate import ModelEntry
    from dave_vit.models import Adapter, Prepare

R = TypeVar("R")


def expand_groups(command: Callable[..., R]) -> Callable[..., R]:
    """Return a command with groups in its signature as typer takes it: with an option for each field of a group."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        alone = [parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)]
        parameters += _group_parameters(groups[name], parameter.default) if name in groups else alone

    @functools.wraps(command)
    def run(**values: Any) -> R:
        built = {
            name: group(**{one.name: values.pop(one.name) for one in fields(group) if one.init})
            for name, group in groups.items()
        }
        return command(**values, **built)

    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _group_parameters(group: Any, defaults: Any) -> Iterator[inspect.Parameter]:
    """Yield the fields of a group as parameters; `defaults` is a group of this kind, or nothing."""
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        own = inspect.Parameter.empty if one.default is MISSING else one.default
        default = own if defaults is inspect.Parameter.empty else getattr(defaults, one.name)
        if one.init:
            yield inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[one.name]
            )


def explicit_options(context: typer.Context, group: Any) -> dict[str, Any]:
    """Return the fields of a group that the command line gave, without defaults."""
    sources = {one.name: context.get_parameter_source(one.name) for one in fields(group) if one.init}
    return {name: getattr(group, name) for name, source in sources.items() if source and source.name != "DEFAULT"}


def flag(text: str, *names: str, **more: Any) -> Any:
    """Return an option with this help text; without names it is called as its parameter."""
    return typer.Option(*names, help=text, **more)


Model = Annotated[str, flag("Model to explain: {models}.", "--model", "-m", metavar="SPEC")]
Models = Annotated[
    list[str] | None,
    flag("Model, as of `dave explain`; repeatable.", "--model", "-m", metavar="SPEC", show_default="builtin"),
]
Weights = Annotated[
    str | None,
    flag("Load weights from a local .safetensors or .pth file instead of a download.", "--weights", metavar="FILE"),
]
Classes = Annotated[
    Path | None, flag("Read class names from a text file, one per line, or from JSON.", "--classes", metavar="FILE")
]
Device = Annotated[
    str, flag("Device: cpu, cuda, cuda:1 and so on; auto takes the GPU where there is one.", "--device", metavar="NAME")
]


def _limit_memory(context: typer.Context, memory: str | None) -> str | None:
    """Set the limit for this command and the processes that it starts."""
    from dave_vit.methods.memory import MEMORY_VARIABLE, parse_memory

    before = os.environ.get(MEMORY_VARIABLE)
    if memory is not None:
        parse_memory(memory)
        os.environ[MEMORY_VARIABLE] = memory
        context.call_on_close(lambda: _restore(MEMORY_VARIABLE, before))
    return memory


def _restore(variable: str, value: str | None) -> None:
    os.environ.pop(variable)
    os.environ.update({} if value is None else {variable: value})


Memory = Annotated[
    str | None,
    flag(
        "Most memory of a pass, such as 8GiB, or as a share of what is free such as 0.5; changes speed, not the maps.",
        "--memory",
        metavar="SIZE",
        callback=_limit_memory,
        show_default="half of a GPU's free memory",
    ),
]
Data = Annotated[str, flag("Data set: {data}.", "--data", metavar="SPEC")]
Seed = Annotated[int, flag("Random seed; the same seed gives the same result.", "--seed", min=0, max=2**31 - 1)]


def _samples(text: str) -> int | str:
    """Parse a number of samples, or auto."""
    if text.strip() == "auto":
        return "auto"
    if not text.strip().isdigit() or int(text) < 1:
        raise typer.BadParameter(f"{text}; expected a whole number of at least 1, or auto")
    return int(text)


Samples = Annotated[
    str | None,  # a number, once it is read
    flag(
        "Number of perturbed copies of each image; auto draws until DAVE's map settles.",
        "--samples",
        "-n",
        metavar="N|auto",
        parser=_samples,
        show_default="the preset's",
    ),
]
Against = Annotated[
    str | None,
    flag(
        "Explain the class in contrast to its rivals, or to one class by name or index; none for the class alone.",
        "--against",
        metavar="rivals|CLASS",
        show_default="the method's",
    ),
]
Method = Annotated[str, flag("Attribution method: {methods}.", "--method", metavar="NAME")]
Methods = Annotated[
    str,
    flag("Attribution methods with commas between, or all; `dave methods` lists them.", "--methods", metavar="A,B,..."),
]
Preset = Annotated[
    str | None,
    flag(
        "Preset of DAVE: {presets}, or a .toml file of `dave tune`.",
        "--preset",
        metavar="NAME|FILE",
        show_default="default",
    ),
]
Settings = Annotated[
    list[str] | None,
    flag("Set any other option of the method, such as rotation=0; repeatable.", "--set", metavar="NAME=VALUE"),
]
Out = Annotated[Path, flag("Folder for the results; created if absent.", "--out", "-o", metavar="DIR")]
Json = Annotated[bool, flag("Print the results as JSON on standard output.", "--json")]
Quiet = Annotated[bool, flag("Print nothing but errors.", "--quiet", "-q")]


@dataclass(frozen=True)
class ModelOptions:
    """One model and its device."""

    spec: Model = "builtin"
    weights: Weights = None
    classes: Classes = None
    device: Device = "auto"
    memory: Memory = None

    @property
    def prepare(self) -> Prepare | None:
        """The preprocessing that replaces the model's own, if any."""
        return None

    def load(self, prompt: str | None = None) -> Adapter:
        """Load the model in evaluation mode; the prompt becomes the class of a zero-shot classifier."""
        from dave_vit.models import load_model
        from dave_vit.models.families import FAMILIES
        from dave_vit.models.loading import parse_spec

        is_zero_shot = FAMILIES[parse_spec(self.spec)[0]].takes("prompts")
        prompts = [prompt] if prompt is not None and is_zero_shot else None
        device = pick_device(self.device)
        return load_model(self.spec, self.weights, device, classes=self.classes, prompts=prompts, prepare=self.prepare)


@dataclass(frozen=True)
class ModelsOptions:
    """Several models and their device."""

    specs: Models = None
    weights: Weights = None
    device: Device = "auto"
    memory: Memory = None

    def entries(self, *otherwise: str) -> tuple[ModelEntry, ...]:
        """Return the models as entries of a plan; `otherwise` where none was given."""
        from dave_vit.evaluate import ModelEntry

        specs = self.specs or otherwise
        if self.weights is not None and len(specs) != 1:
            raise OptionError("--weights belongs to one --model; give exactly one")
        return tuple(ModelEntry(spec, self.weights, label=spec.rpartition(":")[2]) for spec in specs)


@dataclass(frozen=True)
class MethodOptions:
    """One method with its options."""

    name: Method = "dave"
    samples: Samples = None
    preset: Preset = None
    settings: Settings = None
    seed: Seed = 0
    against: Against = None

    def options(self) -> dict[str, Any]:
        """Return the options of the method; samples or a preset that it does not take are an error, a seed is not."""
        from dave_vit.methods.options import check_options, declared_options, filter_options, parse_options

        flags = {"samples": self.samples, "preset": self.preset}
        for name, value in flags.items():
            if value is not None and name not in declared_options(self.name):
                raise OptionError(f"method {self.name!r} takes no --{name}; leave it out")
        check_options(self.name, {name: value for name, value in flags.items() if value is not None})
        texts = dict(parse_setting(text, "NAME=VALUE, such as --set rotation=0") for text in self.settings or [])
        if "against" in texts:
            raise OptionError(f"--set against={texts['against']}; give --against {texts['against']} instead")
        return check_options(self.name, filter_options(self.name, **flags, seed=self.seed)) | parse_options(
            self.name, texts
        )


@dataclass(frozen=True)
class MethodsOptions:
    """Several methods, with options that go to every method that takes them."""

    names: Methods = "dave"
    samples: Samples = None
    seed: Seed = 0
    against: Against = None


@dataclass(frozen=True)
class Plugins:
    """Python files of the user."""

    plugins: Annotated[
        list[Path] | None,
        flag(
            "Import a Python file that registers methods, metrics or anything else of your own; repeatable.",
            "--plugin",
            metavar="FILE",
        ),
    ] = None


@dataclass(frozen=True)
class DrawingOptions:
    """Colours of maps."""

    view: Annotated[
        Literal["map", "signed"],
        flag("Show evidence for the class, or signed: evidence for it in violet and against it in orange."),
    ] = "map"
    scales: Annotated[
        Literal["shared", "own"], flag("Colour scale of maps beside each other: one for all, or one for each.")
    ] = "shared"


def parse_setting(text: str, expected: str) -> tuple[str, str]:
    """Split one `--set` into name and value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--set {text}; expected {expected}")
    return name.strip(), value


def pick_device(name: str) -> str:
    """Return the device of `--device`; load_model checks whether it exists."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
