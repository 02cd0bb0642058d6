"""`dave models`: which architectures are explained exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dave_vit.cli.common import Output, command, examples
from dave_vit.cli.options import expand_groups
from dave_vit.errors import OptionError, UnknownName

app = command()


@app.command(epilog=examples("dave models", "dave models swin", "dave models 'timm:vit_*'", "dave models --json"))
@expand_groups
def models(
    *,
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="Part of a library's, family's or architecture's name.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Also write the whole table as Markdown.")
    ] = None,
    output: Output,
) -> None:
    """Check architectures of all supported libraries, and show which are explained exactly.

    Each is built by its own library, in small and with random weights, so nothing is downloaded. The whole table takes
    about a minute. For a model of your own use `dave doctor`.
    """
    from dave_vit.checks.coverage import architectures, check, markdown

    if write is not None and pattern is not None:
        raise OptionError("--write writes the whole table; leave PATTERN out")
    entries = architectures(pattern)
    if not entries:
        raise UnknownName(f"no architecture of the table fits {pattern!r}; see all: dave models")
    rows = []
    with output.progress(total=len(entries)) as bar:
        for entry in entries:
            bar.update(text=entry.name)
            rows.append(check(entry))
            bar.update(advance=1)
    if write is not None:
        from dave_vit._internal.atomic_files import write_bytes

        write_bytes(write, markdown(rows).encode())
    output.print(_table(rows), *(f"{row.entry.name}: {row.reason}" for row in rows if row.reason))
    output.json([_record(row) for row in rows])


def _table(rows: list[Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for header in ("library", "family", "architecture", "state", "gap"):
        table.add_column(header, no_wrap=header in ("library", "state", "gap"))
    for row in rows:
        gap = "" if row.reason else f"{row.gap:.0e}" if row.gap else "0"
        table.add_row(row.entry.library, row.entry.family, row.entry.name, row.state, gap)
    return table


def _record(row: Any) -> dict[str, Any]:
    measured = {} if row.reason else {"gap": row.gap, "forward_difference": row.forward}
    reason = {"reason": row.reason} if row.reason else {}
    names = {"library": row.entry.library, "family": row.entry.family, "architecture": row.entry.name}
    return {**names, "state": row.state, **measured, **reason}
