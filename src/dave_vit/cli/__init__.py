"""The command line: `dave COMMAND`, one module of this package for each command.

A module holds a function of its name under `@command()` from `dave_vit.cli.common`, or an app of its name where the
command has subcommands. It imports torch and whatever needs torch inside of its functions, so that `dave --help`
answers at once. Errors that a user can repair are raised as `DaveError`; `run` prints them.
"""

import importlib
import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dave_vit._internal.registry import import_plugins, suggest_names
from dave_vit._version import __version__
from dave_vit.errors import DaveError, UnknownName, escape_unprintable, first_line, is_out_of_memory

# In the order of `dave --help`.
COMMANDS = "explain compare methods models doctor tune evaluate diff audit analyze reproduce probe serve demo".split()
INTERRUPTED = 130  # what shells report for a program that ended by Ctrl-C
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # which Windows has not


class Stopped(BaseException):
    """A signal ended the program; temporary files and processes end with it, as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        self.code = 128 + number  # what shells report for it
        super().__init__(signal.Signals(number).name)


class _Commands(TyperGroup):
    """Commands whose modules are imported only when they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return COMMANDS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS and ctx.resilient_parsing:  # a shell completes what is not finished yet
            return None
        if cmd_name not in COMMANDS:
            raise UnknownName(f"unknown command {cmd_name!r}{suggest_names(cmd_name, COMMANDS)}; see: dave --help")
        command = typer.main.get_command(getattr(importlib.import_module(f"{__name__}.{cmd_name}"), cmd_name))
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,  # brackets in a help text stay what they are
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _dave(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """Explain what a Vision Transformer saw: DAVE and its rivals, drawn and measured."""
    if version:
        typer.echo(f"dave {__version__}")
        raise typer.Exit


def run(args: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        args: arguments after `dave`; those of the process by default.

    Returns:
        0 for success, 2 after an error that the user can fix (one line on standard error), 128 plus the number of a
        signal that ended it (130 after Ctrl-C).
    """
    arguments = sys.argv[1:] if args is None else args
    try:
        with _raise_on_signals():
            import_plugins(_plugin_files(arguments))  # before any name is looked up, also that of a subcommand
            code = app(arguments or ["--help"], prog_name="dave", standalone_mode=False, obj=arguments)
    except DaveError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Stopped as stop:
        typer.echo(f"\nstopped by {stop}; what was finished is kept", err=True)
        return stop.code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if is_out_of_memory(error):
            reason = first_line(error).partition(". ")[0]
            return _fail(f"out of memory ({reason}); close other programs that use it, or choose another --device")
        if not hasattr(error, "format_message"):  # typer's own errors have it, in all of its versions
            raise
        where = getattr(getattr(error, "ctx", None), "command_path", "dave")
        return _fail(error.format_message().replace("Value error, ", ""), where)
    if code == INTERRUPTED:
        typer.echo("\nstopped; what was finished is kept", err=True)
    return code if isinstance(code, int) else 0


def _plugin_files(arguments: list[str]) -> list[str]:
    separate = [value for flag, value in itertools.pairwise(arguments) if flag == "--plugin"]
    return separate + [one.partition("=")[2] for one in arguments if one.startswith("--plugin=")]


@contextmanager
def _raise_on_signals() -> Iterator[None]:
    """Turn signals that end the program into an exception, so that temporary files and processes end with it."""
    alone = threading.current_thread() is threading.main_thread()  # nobody else may listen to signals
    heard = [one for one in _SIGNALS if alone and signal.getsignal(one) is not signal.SIG_IGN]  # as under nohup
    before = {one: signal.signal(one, _stop) for one in heard}
    try:
        yield
    finally:
        for one, listener in before.items():
            signal.signal(one, listener)


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)


def _fail(message: str, where: str = "") -> int:
    hint = f"; see: {where} --help" if where else ""
    typer.echo(f"error: {' '.join(escape_unprintable(message).split()).rstrip('.')}{hint}", err=True)
    return 2


def main() -> None:
    """The console script."""
    sys.exit(run())
