"""`dave diff`: what changed from one run to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dave_vit.cli.common import Output, command, examples
from dave_vit.cli.options import expand_groups
from dave_vit.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

app = command()


@app.command(
    epilog=examples(
        "dave diff run-before run-after",
        "dave diff run run --pair dave=dave-paper",
        "dave diff run-before run-after --json",
    )
)
@expand_groups
def diff(
    *,
    before: Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder of dave evaluate; what is compared with.")],
    after: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one; what is new.")],
    pair: Annotated[
        list[str] | None,
        typer.Option("--pair", metavar="A=B", help="A method of the first run with one of the second; repeatable."),
    ] = None,
    output: Output,
) -> None:
    """Compare two runs: the second minus the first, on the images that both scored.

    Differences have 95 % intervals of a bootstrap over images; grids count where both runs have the same ones. Runs
    need not be finished, and one run can be compared with itself, method with method.
    """
    from dave_vit.evaluate.statistics.compare import compare_runs, describe_changes, read_run

    first, second = read_run(before), read_run(after)
    found = compare_runs(first, second, _pairs(pair or []))
    said = describe_changes(first, second)
    output.print(*(f"  {change}" for change in said))
    output.print(_table(found))
    output.json({"changes": said, "differences": found})


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        old, equals, new = text.partition("=")
        if not (equals and old.strip() and new.strip()):
            raise OptionError(f"--pair {text}; expected A=B, such as dave=dave-paper")
        pairs[old.strip()] = new.strip()
    return pairs


def _table(found: list[dict[str, Any]]) -> Table:
    """One line for each model, metric and method; a star where the interval leaves out zero."""
    from rich.table import Table

    table = Table("model", "metric", "method", "before", "after", "change", "", "n", "images", box=None)
    for one in found:
        change = f"{one['mean']:+.4f} [{one['low']:+.4f}, {one['high']:+.4f}]"
        sure = "*" if one["low"] > 0 or one["high"] < 0 else ""
        means = (f"{one[name]:.4f}" for name in ("before", "after"))
        counts = (str(one[name]) for name in ("n", "images"))
        table.add_row(one["model"], one["metric"], one["method"], *means, change, sure, *counts)
    return table
