"""Options that several commands share, each declared once, and groups of them.

A group is a dataclass whose fields are options as typer declares them; an `OptionGroup` is a frozen one. A command
names groups in its signature, and `expand_groups` lets typer see the fields instead of the group:

    @command("dave explain cat.jpg")
    def explain(images: Images, model: ModelOptions, method: MethodOptions) -> None: ...

A parameter's default is a group with other defaults: `model: ModelOptions = ModelOptions(device="cpu")`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, dataclass_transform, get_type_hints

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

    return set_parameters(run, parameters)


def set_parameters(function: Callable[..., R], parameters: Sequence[inspect.Parameter]) -> Callable[..., R]:
    """Give a function of keywords the signature that typer reads."""
    function.__annotations__ = {one.name: one.annotation for one in parameters}
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def _group_parameters(group: Any, defaults: Any) -> Iterator[inspect.Parameter]:
    """Yield the fields of a group as parameters; `defaults` is a group of this kind, or nothing."""
    hints = get_type_hints(group, include_extras=True)
    for one in filter(attrgetter("init"), fields(group)):
        own = inspect.Parameter.empty if one.default is MISSING else one.default
        default = own if defaults is inspect.Parameter.empty else getattr(defaults, one.name)
        hint = Annotated[hints[one.name], one.metadata["option"]] if one.metadata else hints[one.name]
        yield inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def flag(declaration: str, text: str, shown: str = "", **more: Any) -> Any:
    """Return an option.

    Args:
        declaration: its names and what stands for its value, if any, such as "--samples -n N".
        text: its help.
        shown: the default in its help, if the value itself says too little.
        more: arguments of `typer.Option`.
    """
    words = declaration.split()
    names = [word for word in words if word.startswith("-")]
    metavar = words[-1] if len(words) > len(names) else None
    return typer.Option(*names, help=text, metavar=metavar, show_default=shown or True, **more)


def option(declaration: str, text: str, shown: str = "", *, default: Any = None, **more: Any) -> Any:
    """Return a field of a group that is an option; see `flag`."""
    return field(default=default, metadata={"option": flag(declaration, text, shown, **more)})


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class OptionGroup:
    """Base of groups: makes each of its subclasses a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def explicit(self, context: typer.Context) -> dict[str, Any]:
        """Return the fields that the command line gave, without defaults."""
        sources = {name: context.get_parameter_source(name) for name in vars(self)}
        return {name: getattr(self, name) for name, source in sources.items() if source and source.name != "DEFAULT"}


Models = Annotated[list[str] | None, flag("--model -m SPEC", "Model, as in `dave explain`; repeatable.", "builtin")]
Weights = Annotated[
    str | None, flag("--weights FILE", "Load weights from a local .safetensors or .pth file instead of a download.")
]
Device = Annotated[
    str, flag("--device NAME", "Device: cpu, cuda, cuda:1 and so on; auto takes the GPU where there is one.")
]


def _limit_memory(context: typer.Context, memory: str | None) -> str | None:
    """Set the limit for this command and the processes that it starts."""
    from dave_vit.methods.pass_size import MEMORY_VARIABLE, parse_memory

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
        "--memory SIZE",
        "Most memory of a pass, such as 8GiB, or as a share of what is free such as 0.5; changes speed, not the maps.",
        "half of a GPU's free memory, at most 16 GiB",
        callback=_limit_memory,
    ),
]
Data = Annotated[str, flag("--data SPEC", "Data set: {data}.")]
Seed = Annotated[int, flag("--seed", "Random seed; the same seed gives the same result.", min=0, max=2**31 - 1)]


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
        "--samples -n N|auto",
        "Number of perturbed copies of each image; auto draws until DAVE's map settles.",
        "the preset's",
        parser=_samples,
    ),
]
Against = Annotated[
    str | None,
    flag(
        "--against rivals|CLASS",
        "Explain the class in contrast to its rivals, or to one class by name or index; none for the class alone.",
        "the method's",
    ),
]
Preset = Annotated[
    str | None, flag("--preset NAME|FILE", "Preset of DAVE: {presets}, or a .toml file of `dave tune`.", "default")
]
Out = Annotated[Path, flag("--out -o DIR", "Folder for the results; created if absent.")]
Plugins = Annotated[
    list[str] | None,
    flag(
        "--plugin FILE",
        "Import a Python file that registers methods, metrics or anything else of your own; repeatable.",
    ),
]
Json = Annotated[bool, flag("--json", "Print the results as JSON on standard output.")]
Quiet = Annotated[bool, flag("--quiet -q", "Print nothing but errors.")]


class ModelOptions(OptionGroup):
    """One model, its device, and preprocessing that replaces the model's own."""

    spec: str = option("--model -m SPEC", "Model to explain: {models}.", default="builtin")
    weights: Weights = None
    classes: str | None = option("--classes FILE", "Read class names from a text file, one per line, or from JSON.")
    device: Device = "auto"
    memory: Memory = None
    fit: Literal["crop", "pad", "squash", "tiles"] | None = option(
        "--fit",
        "Fit photographs into the model's input: crop the middle, pad to show all, squash all, or explain "
        "tiles one by one.",
        "the model's",
    )
    size: int | None = option("--size PIXELS", "Side of the model's input.", "the model's")
    mean: str | None = option("--mean R,G,B", "Mean that is subtracted from colours in 0 to 1.", "the model's")
    std: str | None = option("--std R,G,B", "Standard deviation that colours are divided by.", "the model's")
    crop: float | None = option("--crop SHARE", "Share of the photograph's shorter side that is shown.", "the model's")

    @property
    def prepare(self) -> Prepare | None:
        """The preprocessing that replaces the model's own, if any."""
        from dave_vit.models import Prepare

        mean, std = _parse_colour("mean", self.mean), _parse_colour("std", self.std)
        prepare = Prepare(self.size, mean, std, self.crop, self.fit)
        return None if prepare == Prepare() else prepare

    @property
    def entry(self) -> ModelEntry:
        """The model as an entry of a plan."""
        from dave_vit.evaluate import ModelEntry

        return ModelEntry(self.spec, self.weights, self.classes, self.prepare)

    def load(self, prompt: str | None = None) -> Adapter:
        """Load the model in evaluation mode; the prompt becomes the class of a zero-shot classifier."""
        from dave_vit.models import load_model
        from dave_vit.models.families import FAMILIES
        from dave_vit.models.loading import parse_spec

        is_zero_shot = FAMILIES[parse_spec(self.spec)[0]].takes("prompts")
        prompts = [prompt] if prompt is not None and is_zero_shot else None
        device = pick_device(self.device)
        return load_model(self.spec, self.weights, device, classes=self.classes, prompts=prompts, prepare=self.prepare)


def _parse_colour(name: str, text: str | None) -> tuple[float, float, float] | None:
    """Parse three numbers, or one for all three colours."""
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
        red, green, blue = numbers * 3 if len(numbers) == 1 else numbers
    except ValueError as error:
        raise OptionError(f"--{name} {text}; expected three numbers such as 0.5,0.5,0.5, or one") from error
    return red, green, blue


class ModelsOptions(OptionGroup):
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


class MethodOptions(OptionGroup):
    """One method with its options."""

    name: str = option("--method NAME", "Attribution method: {methods}.", default="dave")
    samples: Samples = None
    preset: Preset = None
    settings: list[str] | None = option(
        "--set NAME=VALUE", "Set any other option of the method, such as rotation=0; repeatable."
    )
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
        texts = {}
        for text in self.settings or []:
            name, equals, texts[name.strip()] = text.partition("=")
            if not equals:
                raise OptionError(f"--set {text}; expected NAME=VALUE, such as --set rotation=0")
        if "against" in texts:
            raise OptionError(f"--set against={texts['against']}; give --against {texts['against']} instead")
        options = check_options(self.name, filter_options(self.name, **flags, seed=self.seed))
        return options | parse_options(self.name, texts)


class MethodsOptions(OptionGroup):
    """Several methods, with options that go to every method that takes them."""

    names: str = option(
        "--methods A,B,...",
        "Attribution methods separated by commas, or all; `dave methods` lists them.",
        default="dave",
    )
    samples: Samples = None
    seed: Seed = 0
    against: Against = None


class DrawingOptions(OptionGroup):
    """Colours of maps."""

    view: Literal["map", "signed"] = option(
        "--view",
        "Show evidence for the class, or signed: evidence for it in violet and against it in orange.",
        default="map",
    )
    scales: Literal["shared", "own"] = option(
        "--scales", "Colour scale of maps beside each other: one for all, or one for each.", default="shared"
    )


def pick_device(name: str) -> str:
    """Return the device of `--device`; load_model checks whether it exists."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
