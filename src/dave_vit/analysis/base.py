"""Registry of analyses. An analysis is a function from options to a section of a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

from dave_vit._internal.registry import Registry
from dave_vit.viz.report_section import Section

T = TypeVar("T")
Run = Callable[[Any], Section]


@dataclass(frozen=True)
class Flag:
    """How the command line shows an option; see `flag`."""

    help: str
    least: float | None = None
    most: float | None = None
    metavar: str | None = None
    positional: bool = False


def flag(default: T, text: str, **settings: Any) -> T:
    """Declare a field of an analysis's options that is also a flag of `dave analyze`.

    Args:
        default: default value.
        text: help text.
        settings: further fields of `Flag`.
    """
    option: T = field(default=default, metadata={"flag": Flag(text, **settings)})
    return option


@dataclass(frozen=True)
class Analysis:
    """A registered analysis.

    Attributes:
        name: name of the command and of the files.
        summary: one sentence, the first of the function's docstring.
        options: a frozen dataclass; all fields have defaults.
        run: function from options to a section.
        first_model: whether a suite of several models runs it for the first one only.
    """

    name: str
    summary: str
    options: type[Any]
    run: Run
    first_model: bool = False

    @property
    def flags(self) -> dict[str, Flag]:
        """Flags by the name of their field."""
        return {option.name: option.metadata["flag"] for option in fields(self.options) if "flag" in option.metadata}


ANALYSES: Registry[Analysis] = Registry("analysis")


def analysis(name: str, *, first_model: bool = False) -> Callable[[Run], Run]:
    """Register a function from options to a section as an analysis.

    Args:
        name: name of the analysis.
        first_model: whether a suite of several models runs it for the first one only.
    """

    def register(run: Run) -> Run:
        summary = (run.__doc__ or "").partition("\n")[0]
        ANALYSES.register(name)(Analysis(name, summary, get_type_hints(run)["options"], run, first_model))
        return run

    return register
