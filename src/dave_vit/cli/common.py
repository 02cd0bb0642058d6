"""How commands are declared, where their output goes, and what a run shows while it goes on."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from dave_vit.cli.options import Json, Quiet, expand_groups
from dave_vit.errors import escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console

    from dave_vit.evaluate.run import ProgressCallback
    from dave_vit.models import Adapter


_EVERY_LINE = 30.0  # seconds between two lines of progress in a log


class RegistryCommand(TyperCommand):
    """A command whose help lists registered names: placeholders such as `{models}` in the help of options."""

    def get_help(self, ctx: Any) -> str:
        """Fill in the names now: the registries import torch, and `dave --help` must not."""
        for parameter in self.params:
            text = getattr(parameter, "help", None) or ""
            for placeholder in filter(text.__contains__, _FORMS):
                parameter.help = text.replace(placeholder, _list_forms(placeholder))  # type: ignore[attr-defined]
            if str(getattr(parameter, "show_default", "")).startswith("plan."):
                parameter.show_default = _plan_default(parameter.show_default)  # type: ignore[attr-defined]
        return super().get_help(ctx)


_FORMS = {  # path of a registry, or of a function that returns the forms of its entries
    "{models}": "dave_vit.models.families:family_forms",
    "{data}": "dave_vit.data.sets:dataset_forms",
    "{methods}": "dave_vit.methods:METHODS",
    "{metrics}": "dave_vit.metrics:METRICS",
    "{engines}": "dave_vit.evaluate.engines:ENGINES",
    "{presets}": "dave_vit.methods.presets:PRESETS",
    "{scores}": "dave_vit.engine.scores:score_forms",
}


def _list_forms(placeholder: str) -> str:
    holder = resolve_name(_FORMS[placeholder])
    forms = list(holder() if callable(holder) else holder)
    return f"{', '.join(forms[:-1])} or {forms[-1]}"


def _plan_default(path: str) -> str:
    """Return the default of a plan's setting, such as "plan.batch"."""
    from dave_vit.evaluate import Plan

    value = attrgetter(path.removeprefix("plan."))(Plan())
    return ",".join(entry.label for entry in value) if isinstance(value, tuple) else str(value)


def command(*examples: str, **options: Any) -> Callable[[Callable[..., None]], typer.Typer]:
    """Make a function a command; it may take groups, see `dave_vit.cli.options`, and its help ends with examples."""

    def declare(function: Callable[..., None]) -> typer.Typer:
        app = create_app(*examples)
        app.command(cls=RegistryCommand, epilog=app.info.epilog, **options)(expand_groups(function))
        return app

    return declare


def create_app(*examples: str, **options: Any) -> typer.Typer:
    """Create an app; the examples stand below its help, each on its line."""
    epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
    return typer.Typer(add_completion=False, rich_markup_mode=None, epilog=epilog if examples else None, **options)


def command_line(context: typer.Context) -> str:
    """Return the whole command line, ready to be run again."""
    return shlex.join(["dave", *(context.obj or [])])


@dataclass
class Output:
    """Output of a command.

    Text goes to standard output; with `as_json` one JSON document goes there instead. Progress and notes go to standard
    error. `quiet` leaves errors and JSON only.
    """

    as_json: Json = False
    quiet: Quiet = False
    _bar: Any = field(default=None, init=False)  # while one is shown

    def print(self, *renderables: Any) -> None:
        """Print text, or anything that rich can print, on standard output."""
        if not (self.quiet or self.as_json):
            with self._without_bar():
                for renderable in renderables:
                    shown = escape_unprintable(renderable) if isinstance(renderable, str) else renderable
                    _console().print(shown, soft_wrap=isinstance(shown, str))

    def note(self, text: str) -> None:
        """Print a note on standard error."""
        if not self.quiet:
            with self._without_bar():
                typer.echo(f"note: {escape_unprintable(text)}", err=True)

    def advise(self, model: Adapter) -> None:
        """Print what a model was trained for, where most people need another one."""
        from dave_vit.models.adapter import domain_advice

        advice = domain_advice(model)
        if advice is not None:
            self.note(f"{model.spec} {advice}")

    def error(self, text: str) -> None:
        """Print that one item of several failed; the command continues and exits with 2."""
        with self._without_bar():
            typer.echo(f"error: {' '.join(escape_unprintable(text).split())}", err=True)

    def json(self, data: Any) -> None:
        """Print JSON on standard output if --json was given."""
        if self.as_json:
            typer.echo(escape_unprintable(json.dumps(data, indent=2, ensure_ascii=False)))

    @property
    def on_terminal(self) -> bool:
        """Whether progress is shown on a terminal, where it can be redrawn."""
        return not self.quiet and _console(stderr=True).is_terminal

    @contextmanager
    def progress(self, total: float, text: str = "") -> Iterator[Callable[..., None]]:
        """Show a progress bar on standard error, on terminals only, until the block ends.

        Yields a function that updates it: `completed` or `advance` moves it, `description` changes the text before it.
        """
        if not self.on_terminal:  # where rich before version 15 prints empty lines for a disabled bar
            yield lambda **state: None
            return
        from rich import progress

        # rich would send what is printed meanwhile to standard error as well
        keep: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
        with progress.Progress(console=_console(stderr=True), transient=True, **keep) as bar:
            self._bar = bar
            try:
                yield partial(bar.update, bar.add_task(text, total=total))
            finally:
                self._bar = None

    @contextmanager
    def _without_bar(self) -> Iterator[None]:
        """Hide the progress bar while something else is printed."""
        bar = self._bar
        if bar is not None:
            bar.stop()
        yield
        if bar is not None:
            bar.start()


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False)


def rich_table(head: Iterable[Any], rows: Iterable[Iterable[str]], caption: str = "", **layout: Any) -> Any:
    """Return a table for `Output.print`; its head holds texts, or columns of rich."""
    from rich.table import Table

    table = Table(*head, box=None, title=caption or None, title_justify="left", **layout)
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def show_bars(output: Output) -> Iterator[ProgressCallback]:
    """Show a progress bar for each phase of a run, or a line now and then in a log."""
    current, started, updated = "", 0.0, time.monotonic()  # a short phase needs no line
    with ExitStack() as stack:
        bars: dict[str, Callable[..., None]] = {}

        def update(phase: str, done: int, total: int, before: int) -> None:
            nonlocal current, started, updated
            if phase != current:
                current, started = phase, time.monotonic()
            rate = max(done - before, 0) / max(time.monotonic() - started, 1e-6)
            left = f", {_format_duration((total - done) / rate)} left" if rate else ""
            line = f"{phase}: {done} of {total}, {rate:.3g} a second{left}"
            if output.on_terminal:
                if phase not in bars:
                    stack.close()  # the bar of the phase before
                    bars[phase] = stack.enter_context(output.progress(total - before, phase))
                bars[phase](completed=max(done - before, 0), description=line)
            elif time.monotonic() - updated >= _EVERY_LINE:
                updated = time.monotonic()
                output.note(line)

        yield update


def _format_duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
