"""The command line as a whole: quick help with examples, one line for each error, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

import dave_vit
from dave_vit import cli
from dave_vit.cli.common import Output
from dave_vit.cli.options import MethodOptions
from dave_vit.errors import DaveError, OptionError

PRESENT = cli._Commands(name="dave").list_commands(None)


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(args, capsys):
    assert cli.run(args) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in PRESENT)


@pytest.mark.parametrize("name", PRESENT)
def test_every_command_has_help_with_two_examples(name, capsys):
    assert cli.run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: dave {name}")
    assert sum(line.strip().startswith(f"dave {name}") for line in lines(out)) >= 2, out


def test_help_needs_no_torch():
    # The package's public names need torch; the command line must not.
    code = (
        "import sys, types; package = types.ModuleType('dave_vit'); package.__path__ = [sys.argv[1]];"
        "sys.modules['dave_vit'] = package; from dave_vit.cli import run; code = run(['--help']);"
        "heavy = {'torch', 'matplotlib', 'timm', 'numpy'} & set(sys.modules); sys.exit(code or str(heavy or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(dave_vit.__file__).parent)], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == ""
    assert "explain" in done.stdout


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"dave {dave_vit.__version__}\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["explian"], ["unknown command 'explian'", "did you mean explain?", "dave --help"]),
        (["explain"], ["Missing argument 'IMAGE'", "dave explain --help"]),
        (["explain", "a.png", "--samples", "0"], ["--samples", "dave explain --help"]),
        (["explain", "a.png", "--samples", "many"], ["--samples"]),
        (["explain", "a.png", "--sampels", "3"], ["--sampels", "--samples"]),
        (["explain", "a.png", "--format", "bmp"], ["--format", "png"]),
        (["explain", "a.png", "--method", "dav"], ["unknown method 'dav'", "did you mean dave"]),
        (["explain", "a.png", "--method", "effective", "--samples", "3"], ["'effective' takes no --samples"]),
        (["explain", "a.png", "--set", "rotation"], ["NAME=VALUE"]),
        (["explain", "a.png", "--method", "effective", "--animate", "gif"], ["does not refine", "--animate"]),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_two(args, words, capsys):
    assert cli.run(args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(lines(shown.err)) == 1
    assert shown.err.startswith("error: ")
    assert all(word in shown.err for word in words), shown.err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (DaveError("what was given\nwhat was expected"), 2, "error: what was given what was expected"),
        (PermissionError(13, "Permission denied", "out/x.png"), 2, "error: out/x.png: Permission denied"),
        (KeyboardInterrupt(), 130, "stopped"),
        (typer.Abort(), 130, "stopped"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_inside_of_a_command_become_exit_codes(error, code, words, capsys, monkeypatch):
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(MethodOptions, "options", fail)
    assert cli.run(["explain", "a.png"]) == code
    assert words in capsys.readouterr().err


def test_a_mistake_of_ours_is_not_hidden(monkeypatch):
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(MethodOptions, "options", fail)
    with pytest.raises(ZeroDivisionError):
        cli.run(["explain", "a.png"])


def test_switches_are_read_as_json_or_as_words():
    given = ["rotation=0", "noise=none", "scale=[0.9, 1.1]", "wrap=false"]
    expected = {"seed": 3, "rotation": 0, "noise": "none", "scale": [0.9, 1.1], "wrap": False}
    assert MethodOptions("dave", settings=given, seed=3).options() == expected
    assert MethodOptions("effective", seed=3).options() == {}
    with pytest.raises(OptionError, match="--preset"):
        MethodOptions("effective", preset="paper").options()


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [
        ({}, "words\n", "note: careful\nerror: one failed\n"),
        ({"quiet": True}, "", "error: one failed\n"),
        ({"as_json": True}, "[\n  1\n]\n", "note: careful\nerror: one failed\n"),
        ({"as_json": True, "quiet": True}, "[\n  1\n]\n", "error: one failed\n"),
    ],
)
def test_words_for_people_json_for_machines_errors_always(options, out, err, capsys):
    output = Output(**options)
    with output.progress(2, "working") as update:
        update(completed=1)
        output.print("words")
        output.note("careful")
        output.error("one\nfailed")
    output.json([1])
    assert capsys.readouterr() == (out, err)


def test_completion_knows_commands_and_options(monkeypatch):
    command = typer.main.get_command(cli.app)
    context = command.make_context("dave", ["explain", "x.png"], resilient_parsing=True)
    assert command.get_command(context, "expl") is None
    assert command.get_command(context, "explain").name == "explain"
