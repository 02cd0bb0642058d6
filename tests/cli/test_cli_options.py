"""Groups of options: a command names them once, typer sees their fields."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from dave_vit._internal.registry import split_names
from dave_vit.cli.options import ModelsOptions, OptionGroup, expand_groups
from dave_vit.errors import OptionError


class Size(OptionGroup):
    """A group as commands share it."""

    width: Annotated[int, typer.Option("--width", "-w", min=1, help="In pixels.")] = 3
    unit: Annotated[str, typer.Option("--unit")] = "px"
    area: int = field(default=0, init=False)


@dataclass(frozen=True)
class Named:
    """A group with a field that must be given."""

    name: Annotated[str, typer.Option("--name")]


SMALL = Size(width=1)


def call(command, *args: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(expand_groups(command))
    done = CliRunner().invoke(app, [*args])
    return done.exit_code, done.output


def test_fields_become_options_and_come_back_as_a_group():
    seen = []

    def draw(*, path: str, size: Size, named: Named, loud: bool = False) -> None:
        """Draws."""
        seen.append((path, size, named, loud))

    assert call(draw, "here", "-w", "7", "--name", "x")[0] == 0
    assert call(draw, "there", "--unit", "mm", "--loud", "--name", "y")[0] == 0
    assert seen == [("here", Size(7), Named("x"), False), ("there", Size(3, "mm"), Named("y"), True)]
    assert list(inspect.signature(expand_groups(draw)).parameters) == ["path", "width", "unit", "name", "loud"]


def test_a_limit_of_memory_holds_for_the_command_and_what_it_starts(monkeypatch):
    seen = []

    def draw(*, models: ModelsOptions) -> None:
        """Draws."""
        seen.append(os.environ.get("DAVE_MEMORY"))

    monkeypatch.delenv("DAVE_MEMORY", raising=False)
    assert call(draw, "--memory", "8GiB")[0] == call(draw)[0] == 0
    monkeypatch.setenv("DAVE_MEMORY", "0.25")
    assert call(draw, "--memory", "8GiB")[0] == 0
    assert seen == ["8GiB", None, "8GiB"]
    assert os.environ["DAVE_MEMORY"] == "0.25"
    assert call(draw, "--memory", "much")[0] != 0


def test_help_and_refusals_are_those_of_the_fields():
    def draw(*, size: Size, named: Named) -> None:
        """Draws."""

    code, text = call(draw, "--help")
    assert code == 0
    assert all(word in text for word in ("--width", "In pixels.", "Draws.", "3", "--name"))
    assert "area" not in text  # no argument of the group
    assert call(draw, "--name", "x", "--width", "0")[0] == 2
    assert call(draw)[0] == 2  # the name is missing


def test_a_default_is_a_group_with_other_defaults():
    seen = []

    def draw(size: Size = SMALL) -> None:
        seen.append(size)

    call(draw)
    call(draw, "--unit", "mm")
    assert seen == [Size(1), Size(1, "mm")]


def test_a_group_may_be_called_as_a_field_is():
    seen = []

    def draw(*, width: Named, size: Size) -> None:
        seen.append((width, size))

    assert call(draw, "--name", "x", "-w", "7")[0] == 0
    assert seen == [(Named("x"), Size(7))]


def test_two_groups_cannot_hold_the_same_name():
    def draw(*, size: Size, other: Size) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'width'"):
        expand_groups(draw)


def test_what_was_given_is_told_from_defaults():
    seen = []

    def draw(*, context: typer.Context, size: Size) -> None:
        seen.append(size.explicit(context))

    call(draw)
    call(draw, "--width", "3")  # the default, said aloud
    assert seen == [{}, {"width": 3}]


def test_weights_belong_to_one_model():
    assert [entry.label for entry in ModelsOptions(["timm:a", "b"]).entries()] == ["a", "b"]
    assert [entry.weights for entry in ModelsOptions(weights="w.pth").entries("builtin")] == ["w.pth"]
    for specs, otherwise in ((["a", "b"], ()), (None, ()), (None, ("a", "b"))):
        with pytest.raises(OptionError, match="give exactly one"):
            ModelsOptions(specs, weights="w.pth").entries(*otherwise)


def test_names_have_commas_between():
    assert split_names(" b, a,,b ", ["a", "b", "c"]) == ["b", "a"]
    assert split_names("all", ["a", "b", "c"]) == ["a", "b", "c"]
