"""`dave models`: which architectures are explained exactly."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dave_vit.cli.common import Output, command
from dave_vit.errors import UnknownName

app = command("dave models", "dave models swin", "dave models 'timm:vit_*'", "dave models --json")


@app.command()
def models(
    *,
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="Part of a library's, family's or architecture's name.")
    ] = None,
    output: Output,
) -> None:
    """List the families of models, the architectures that were checked and whether each is explained exactly.

    To check a model with the libraries that you have installed, use `dave doctor`.
    """
    from dave_vit.checks.architectures import checked_architectures, library_versions

    rows = checked_architectures(pattern)
    if not rows:
        raise UnknownName(f"no architecture of the table fits {pattern!r}; see all: dave models")
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    reasons = (f"{row.architecture}: {row.reason}" for row in rows if row.reason)
    if pattern is None:
        output.print(_families(), "")
    output.print(_table(rows), *reasons, f"Checked with {versions}.")
    output.json([{name: value for name, value in vars(row).items() if value is not None} for row in rows])


def _families() -> Any:
    from rich.table import Table

    from dave_vit.models.families import family_forms

    table = Table("--model", "loads", "needs", box=None, pad_edge=False)
    for form, family in family_forms().items():
        table.add_row(form, family.summary, f"dave-vit[{family.extra}]" if family.extra else "")
    return table


def _table(rows: list[Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for header in ("library", "family", "architecture", "state", "gap"):
        table.add_column(header, no_wrap=header in ("library", "state", "gap"))
    for row in rows:
        gap = "" if row.gap is None else f"{row.gap:.0e}" if row.gap else "0"
        table.add_row(row.library, row.family, row.architecture, row.state, gap)
    return table
