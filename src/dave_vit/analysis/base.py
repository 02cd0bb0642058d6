"""What every analysis is: options in, a section out; and the table of them."""

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


def flag(default: T, text: str, **how: Any) -> T:
    """A field of an analysis's options that `dave analyze` takes as well.

    Args:
        default: where nothing is said.
        text: what it is.
        how: further fields of `Flag`.
    """
    made: T = field(default=default, metadata={"flag": Flag(text, **how)})
    return made


@dataclass(frozen=True)
class Analysis:
    """An analysis as commands and suites know it.

    Attributes:
        name: of the command and of the files.
        summary: one sentence, the first of its function.
        options: a frozen dataclass; all fields have defaults.
        run: from options to a section.
        first_model: whether a suite of several models shows it for the first one only.
    """

    name: str
    summary: str
    options: type[Any]
    run: Run
    first_model: bool = False

    @property
    def flags(self) -> dict[str, Flag]:
        """By the field of the options."""
        return {one.name: one.metadata["flag"] for one in fields(self.options) if "flag" in one.metadata}


ANALYSES: Registry[Analysis] = Registry("analysis")


def analysis(name: str, *, first_model: bool = False) -> Callable[[Run], Run]:
    """A decorator that files a function from options to a section as an analysis.

    Args:
        name: of the analysis.
        first_model: whether a suite of several models shows it for the first one only.
    """

    def add(run: Run) -> Run:
        summary = (run.__doc__ or "").partition("\n")[0]
        options = get_type_hints(run)["options"]
        ANALYSES.register(name)(Analysis(name, summary, options, run, first_model))
        return run

    return add
