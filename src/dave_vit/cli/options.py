"""Options that several commands share, each declared once, and what makes groups of them.

A group is a dataclass whose fields are options as typer declares them. A command names groups in its signature and is
put under `expand_groups`; typer then sees the fields in place of the group:

    @app.command()
    @expand_groups
    def explain(images: Images, model: ModelOptions, method: MethodOptions) -> None: ...

A parameter's default is a group with other defaults: `model: ModelOptions = ModelOptions(device="cpu")`.
"""

from __future__ import annotations

import functools
import inspect
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
    """A command with groups in its signature, as typer reads it: with an option for each field of each group."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        alone = [parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)]
        parameters += _unfolded(groups[name], parameter.default) if name in groups else alone

    @functools.wraps(command)
    def unfolded(**given: Any) -> R:
        made = {
            name: group(**{one.name: given.pop(one.name) for one in fields(group) if one.init})
            for name, group in groups.items()
        }
        return command(**given, **made)

    unfolded.__annotations__ = {one.name: one.annotation for one in parameters}
    unfolded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return unfolded


def _unfolded(group: Any, defaults: Any) -> Iterator[inspect.Parameter]:
    """The fields of a group as parameters; `defaults` is a group of this kind, or nothing."""
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        own = inspect.Parameter.empty if one.default is MISSING else one.default
        default = own if defaults is inspect.Parameter.empty else getattr(defaults, one.name)
        if one.init:
            yield inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[one.name]
            )


def explicit_options(context: typer.Context, group: Any) -> dict[str, Any]:
    """The fields of a group that the command line gave, without those that are defaults."""
    sources = {one.name: context.get_parameter_source(one.name) for one in fields(group) if one.init}
    return {name: getattr(group, name) for name, source in sources.items() if source and source.name != "DEFAULT"}


def model_flag(text: str, **more: Any) -> Any:
    """The flag --model under a help text of its own."""
    return typer.Option("--model", "-m", metavar="SPEC", help=text, **more)


def data_flag(text: str) -> Any:
    """The flag --data under a help text of its own."""
    return typer.Option("--data", metavar="SPEC", help=text)


Model = Annotated[
    str,
    model_flag("{models}."),
]
Models = Annotated[list[str] | None, model_flag("As of `dave explain`; repeatable.", show_default="builtin")]
Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="FILE", help="Local .safetensors or .pth file instead of a download."),
]
Classes = Annotated[Path | None, typer.Option("--classes", metavar="FILE", help="Class names: one a line, or JSON.")]
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1 ...; auto takes the GPU where there is one.")
]
Data = Annotated[str, data_flag("{data}.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**31 - 1, help="The same seed gives the same result.")]


def _samples(text: str) -> int | str:
    """A number of samples, or auto."""
    if text.strip() == "auto":
        return "auto"
    if not text.strip().isdigit() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is no number of at least 1; give one, or auto")
    return int(text)


Samples = Annotated[
    str | None,  # a number, once it is read
    typer.Option(
        "--samples",
        "-n",
        metavar="N|auto",
        parser=_samples,
        help="Perturbed copies of each image; auto for as many as DAVE's map needs to settle.",
        show_default="the preset's own",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="rivals|CLASS",
        help="Explain the class against its rivals, or against one class by name or index; none for the class alone.",
        show_default="as the method has it",
    ),
]
Method = Annotated[str, typer.Option("--method", metavar="NAME", help="Attribution method: {methods}.")]
Methods = Annotated[
    str, typer.Option("--methods", metavar="A,B,...", help="Names of `dave methods`, with commas between, or all.")
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME|FILE",
        help="Preset of DAVE: {presets}, or a .toml file of `dave tune`.",
        show_default="default",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other option of the method, such as rotation=0; repeatable."),
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the results; made if absent.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


@dataclass(frozen=True)
class ModelOptions:
    """One model, and where it runs."""

    spec: Model = "builtin"
    weights: Weights = None
    classes: Classes = None
    device: Device = "auto"

    @property
    def prepare(self) -> Prepare | None:
        """What is said of the preprocessing, if anything."""
        return None

    def load(self, prompt: str | None = None) -> Adapter:
        """Load the model in evaluation mode; the prompt becomes the class of a zero-shot classifier."""
        from dave_vit.models import load_model
        from dave_vit.models.families import FAMILIES
        from dave_vit.models.loading import parse_spec

        is_zero_shot = FAMILIES[parse_spec(self.spec)[0]].zero_shot
        prompts = [prompt] if prompt is not None and is_zero_shot else None
        device = pick_device(self.device)
        return load_model(self.spec, self.weights, device, classes=self.classes, prompts=prompts, prepare=self.prepare)


@dataclass(frozen=True)
class ModelsOptions:
    """Several models, and where they run."""

    specs: Models = None
    weights: Weights = None
    device: Device = "auto"

    def entries(self, *otherwise: str) -> tuple[ModelEntry, ...]:
        """The models as plans name them; `otherwise` where none was given."""
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
        """Options of the method; samples or a preset that it does not take are an error, a seed is not."""
        from dave_vit.methods.options import check_options, declared_options, filter_options, parse_options

        said = {"samples": self.samples, "preset": self.preset}
        for name, value in said.items():
            if value is not None and name not in declared_options(self.name):
                raise OptionError(f"method {self.name!r} takes no --{name}; leave it out")
        check_options(self.name, {name: value for name, value in said.items() if value is not None})
        texts = dict(parse_setting(text, "NAME=VALUE, such as --set rotation=0") for text in self.settings or [])
        if "against" in texts:
            raise OptionError(f"--set against={texts['against']}; give --against {texts['against']} instead")
        return check_options(self.name, filter_options(self.name, **said, seed=self.seed)) | parse_options(
            self.name, texts
        )


@dataclass(frozen=True)
class MethodsOptions:
    """Several methods, with what those of them take that take it."""

    names: Methods = "dave"
    samples: Samples = None
    seed: Seed = 0
    against: Against = None


def _imported(paths: list[Path] | None) -> list[Path] | None:
    """Registers what is in a user's own files, before anything else is read."""
    from dave_vit._internal.registry import import_plugins

    import_plugins(paths or [])
    return paths


@dataclass(frozen=True)
class Plugins:
    """Files of the user's own."""

    plugins: Annotated[
        list[Path] | None,
        typer.Option(
            "--plugin",
            metavar="FILE",
            callback=_imported,
            is_eager=True,
            help="A Python file that registers methods, metrics or other things of your own; repeatable.",
        ),
    ] = None


@dataclass(frozen=True)
class DrawingOptions:
    """How maps are drawn."""

    view: Annotated[
        Literal["map", "signed"],
        typer.Option("--view", help="What speaks for the class, or signed: violet for it and orange against it."),
    ] = "map"
    scales: Annotated[
        Literal["shared", "own"],
        typer.Option("--scales", help="One colour scale for maps beside each other, or one for each."),
    ] = "shared"


def parse_setting(text: str, expected: str) -> tuple[str, str]:
    """Name and value of one `--set`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--set {text}; expected {expected}")
    return name.strip(), value


def pick_device(name: str) -> str:
    """The device of `--device`; whether it can be used is seen by who puts something there."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
