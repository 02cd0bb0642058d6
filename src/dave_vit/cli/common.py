"""What the commands share: options, output, and the way from options to a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dave_vit.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from dave_vit.models import Adapter

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="SPEC",
        help="builtin, timm:NAME (or just NAME), hf:NAME_OR_FOLDER, torchvision:NAME, openclip:NAME or bcos:NAME.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="FILE", help="Local .safetensors or .pth file instead of a download."),
]
Classes = Annotated[
    Path | None,
    typer.Option("--classes", metavar="FILE", help="Class names: one a line, or JSON."),
]
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1 ...; auto takes the GPU where there is one.")
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same result.")]
Samples = Annotated[
    int | None,
    typer.Option("--samples", "-n", min=1, metavar="N", help="Perturbed copies of each image.", show_default="50"),
]
Method = Annotated[str, typer.Option("--method", metavar="NAME", help="One of `dave methods`.")]
Preset = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME", help="Of DAVE: default, paper or official.", show_default="default"),
]
Switches = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other option of the method, such as rotation=0; repeatable."),
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the results; made if absent.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def command(**options: Any) -> typer.Typer:
    """What a module of a command calls `app`."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, **options)


def examples(*lines: str) -> str:
    """The end of a help text, to be given as `epilog`; each example keeps its line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class Output:
    """Where a command's words go.

    People read standard output; with `as_json` one JSON document goes there instead. Progress and notes always go to
    standard error. `quiet` leaves errors and JSON only.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._bar: Any = None  # while one is shown

    def print(self, *renderables: Any) -> None:
        """For people, on standard output: text, or anything that rich can print."""
        if not (self.quiet or self.as_json):
            with self._aside():
                for renderable in renderables:
                    _console().print(renderable, soft_wrap=isinstance(renderable, str))

    def note(self, text: str) -> None:
        """Worth knowing and no error, on standard error."""
        if not self.quiet:
            with self._aside():
                typer.echo(f"note: {text}", err=True)

    def error(self, text: str) -> None:
        """One item of several failed; the command goes on and exits with 2 at its end."""
        with self._aside():
            typer.echo(f"error: {' '.join(text.split())}", err=True)

    def json(self, data: Any) -> None:
        """For machines, on standard output, where it was asked for."""
        if self.as_json:
            typer.echo(json.dumps(data, indent=2, ensure_ascii=False))

    @contextmanager
    def progress(self, total: float, text: str = "") -> Iterator[Progress]:
        """A progress bar on standard error; it vanishes when done, and shows on terminals only."""
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
        )
        console = _console(stderr=True)
        hidden = self.quiet or not console.is_terminal
        # rich would send what is printed meanwhile to standard error as well
        with progress.Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False, disable=hidden
        ) as bar:
            self._bar = bar
            try:
                yield Progress(bar, bar.add_task(text, total=total))
            finally:
                self._bar = None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Takes the progress bar away while something else is printed."""
        bar = self._bar
        if bar is not None:
            bar.stop()
        yield
        if bar is not None:
            bar.start()


class Progress:
    """One bar of `Output.progress`."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def update(self, *, done: float | None = None, advance: float | None = None, text: str | None = None) -> None:
        """Moves the bar to `done`, or by `advance`, and changes the words before it."""
        self._bar.update(self._task, completed=done, advance=advance, description=text)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False)


def pick_device(name: str) -> str:
    """The device of `--device`; whether it can be used is seen by who puts something there."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def load(spec: str, weights: str | None, device: str, classes: Path | None = None) -> Adapter:
    """The model of `--model`, `--weights`, `--device` and `--classes`, in evaluation mode."""
    from dave_vit.models import load_model

    return load_model(spec, weights, pick_device(device), classes=classes)


def method_options(
    name: str, *, samples: int | None = None, preset: str | None = None, seed: int = 0, switches: Sequence[str] = ()
) -> dict[str, Any]:
    """The options of a method, out of those of a command.

    The seed goes to methods that take one; samples and a preset that the method does not know are an error.

    Args:
        name: of the method.
        samples: of `--samples`, if given.
        preset: of `--preset`, if given.
        seed: of `--seed`.
        switches: of `--set`, each NAME=VALUE.
    """
    import inspect

    from dave_vit.methods import METHODS

    known = inspect.signature(METHODS[name]).parameters
    options = {key: value for key, value in {"samples": samples, "preset": preset}.items() if value is not None}
    for key in options:
        if key not in known:
            raise OptionError(f"method {name!r} takes no --{key}; leave it out")
    if "seed" in known:
        options["seed"] = seed
    return options | dict(_switch(text) for text in switches)


def _switch(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--set {text}; expected NAME=VALUE, such as --set rotation=0")
    try:
        return name.strip(), json.loads(value)
    except ValueError:  # a word
        return name.strip(), value.strip()
