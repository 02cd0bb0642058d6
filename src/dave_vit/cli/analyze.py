"""`dave analyze`: a subcommand for each analysis, with a flag for each of its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from dave_vit.cli.common import Output, command, create_app, rich_table
from dave_vit.cli.options import ModelsOptions, Out, Plugins, Seed, expand_groups, pick_device, set_parameters
from dave_vit.errors import OptionError

if TYPE_CHECKING:
    from dave_vit.analysis import Analysis
    from dave_vit.viz.report_section import Section


class _Analyses(TyperGroup):
    """Subcommands out of the registry, loaded on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        from dave_vit.analysis import ANALYSES

        return sorted(ANALYSES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from dave_vit.analysis import ANALYSES

        if cmd_name not in ANALYSES and ctx.resilient_parsing:  # a shell completes what is not finished yet
            return None
        own = command(name=cmd_name, help=ANALYSES[cmd_name].summary)(_function(ANALYSES[cmd_name]))
        return typer.main.get_command(own)


analyze = create_app(
    "dave analyze convergence --n 8 --samples 64",
    "dave analyze rotation --model timm:deit_tiny_patch16_224 --data imagenet:ILSVRC --n 100",
    "dave analyze construction cat.jpg dog.jpg",
    cls=_Analyses,
    help="Analyses behind the paper's figures: each writes a figure, its numbers (CSV) and a record (JSON).",
)

_MODELS = ModelsOptions()


@analyze.callback()
@expand_groups
def _analyze(*, plugins: Plugins = None) -> None:
    """Import plugins before the name of the analysis is looked up: `dave analyze --plugin FILE NAME`."""


def _function(analysis: Analysis) -> Callable[..., None]:
    """An analysis as a function with a signature that typer reads."""
    kinds = get_type_hints(analysis.options)
    defaults: dict[str, Any] = {one.name: one.default for one in fields(analysis.options)}

    def run(
        *,
        models: ModelsOptions = _MODELS,
        seed: Seed = 0,
        out: Out = Path("dave-analysis"),
        plugins: Plugins = None,
        output: Output,
        **values: Any,
    ) -> None:
        own = {name: _parse_option(name, value, kinds[name], defaults[name]) for name, value in values.items()}
        if "models" in kinds:
            own["device"] = pick_device(models.device)
            own["models"] = models.entries(*(entry.spec for entry in defaults["models"]))
        _write_section(analysis.run(analysis.options(seed=seed, **own)), out, output)

    own_flags = [_parameter(one, kinds[one.name]) for one in fields(analysis.options) if "flag" in one.metadata]
    hidden = {"values"} if "models" in kinds else {"values", "models"}
    shared = inspect.signature(run, eval_str=True).parameters
    return set_parameters(run, [*own_flags, *(one for name, one in shared.items() if name not in hidden)])


def _parameter(field: Field[Any], kind: Any) -> inspect.Parameter:
    """Return an option as a parameter; a tuple is a list of arguments, or words with commas between."""
    name, flag = field.name, field.metadata["flag"]
    default: Any = field.default
    shown: dict[str, Any] = {"metavar": flag.metavar, "help": flag.help}
    if flag.positional:
        default, hint = None, Annotated[list[str] | None, typer.Argument(show_default=False, **shown)]
    else:
        option = typer.Option(f"--{name.replace('_', '-')}", min=flag.least, max=flag.most, **shown)
        several = get_origin(kind) is tuple
        default, hint = ",".join(map(str, default)) if several else default, Annotated[str if several else kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _parse_option(name: str, value: Any, kind: Any, default: Any) -> Any:
    """Return a value of the command line as the options of an analysis take it."""
    from dave_vit.data.images import find_images

    if name == "images":
        return tuple(find_images(value or []))
    if get_origin(kind) is not tuple:
        return value
    if not isinstance(value, str):
        return tuple(value or ())
    word = get_args(kind)[0]
    try:
        return tuple(word(part.strip()) for part in value.split(",") if part.strip())
    except ValueError as error:
        such = ",".join(map(str, default))
        raise OptionError(f"--{name} {value}; expected whole numbers separated by commas, such as {such}") from error


def _write_section(section: Section, out: Path, output: Output) -> None:
    """Write the files of an analysis and print its text and tables."""
    files = section.write(out)
    tables = [rich_table(table.head, table.rows, table.caption) for table in section.tables]
    output.print(section.title, section.text, *tables)
    output.print(*(f"  {path}" for path in files))
    output.json({**section.record(), "files": [str(path) for path in files]})
