"""`dave models`: which architectures are explained exactly."""

from typing import Annotated

import typer

from dave_vit.cli.common import Output, command, rich_table
from dave_vit.errors import UnknownName

_HEAD = ("library", "family", "architecture", "state", "gap")


@command("dave models", "dave models swin", "dave models 'timm:vit_*'", "dave models --json")
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
    from rich.table import Column

    from dave_vit.checks.architectures import checked_architectures, library_versions
    from dave_vit.models.families import family_forms

    rows = checked_architectures(pattern)
    if not rows:
        raise UnknownName(f"no architecture of the table fits {pattern!r}; see all: dave models")
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    reasons = (f"{row.architecture}: {row.reason}" for row in rows if row.reason)
    if pattern is None:
        forms = family_forms().items()
        families = [(form, one.summary, f"dave-vit[{one.extra}]" if one.extra else "") for form, one in forms]
        output.print(rich_table(("--model", "loads", "needs"), families, pad_edge=False), "")
    head = [Column(name, no_wrap=name in ("library", "state", "gap")) for name in _HEAD]
    cells = [(row.library, row.family, row.architecture, row.state, _gap(row.gap)) for row in rows]
    output.print(rich_table(head, cells, pad_edge=False), *reasons, f"Checked with {versions}.")
    output.json([{name: value for name, value in vars(row).items() if value is not None} for row in rows])


def _gap(gap: float | None) -> str:
    return "" if gap is None else f"{gap:.0e}" if gap else "0"
