"""`dave diff`: what changed from one run to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dave_vit.cli.common import Output, command
from dave_vit.cli.options import flag
from dave_vit.cli.tables import rich_table
from dave_vit.errors import OptionError

app = command(
    "dave diff run-before run-after",
    "dave diff run run --pair dave=dave-paper",
    "dave diff run-before run-after --json",
)


@app.command()
def diff(
    *,
    before: Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder of a run of dave evaluate; the baseline.")],
    after: Annotated[Path, typer.Argument(metavar="RUN_B", help="Folder of the new run.")],
    pair: Annotated[
        list[str] | None, flag("Compare a method of the first run with one of the second; repeatable.", metavar="A=B")
    ] = None,
    output: Output,
) -> None:
    """Compare two runs: the second minus the first, on the images that both scored.

    Differences of six or more images have 95 % intervals; only grids that both runs have are compared. Runs need
    not be finished, and a run can be compared with itself, method with method.
    """
    from dave_vit.evaluate.statistics.compare import compare_runs, describe_changes, pair_methods, read_run
    from dave_vit.evaluate.statistics.intervals import describe_comparisons

    first, second = read_run(before), read_run(after)
    pairs = pair_methods(first, second, _parse_pairs(pair or []))
    differences = compare_runs(first, second, pairs)
    changes = describe_changes(first, second, pairs)
    output.print(*(f"  {change}" for change in changes))
    output.print(_table(differences))
    output.print("  * the 95 % interval of the change excludes 0; changes of fewer than six images have no interval")
    if note := describe_comparisons(differences):
        output.print(f"  {note}")
    output.json({"changes": changes, "differences": differences})


def _parse_pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        old, equals, new = text.partition("=")
        if not (equals and old.strip() and new.strip()):
            raise OptionError(f"--pair {text}; expected A=B, such as dave=dave-paper")
        pairs[old.strip()] = new.strip()
    return pairs


def _table(differences: list[dict[str, Any]]) -> Any:
    """Return a table with a row per model, metric and method, and a star if the interval excludes zero."""
    from dave_vit.evaluate.statistics.intervals import excludes_zero

    head = ("model", "metric", "method", "before", "after", "change", "", "n", "images")
    rows = []
    for one in differences:
        names = (one["model"], one["metric"], one["method"])
        interval = "" if one["low"] is None else f" [{one['low']:+.4f}, {one['high']:+.4f}]"
        change, star = f"{one['mean']:+.4f}{interval}", "*" if excludes_zero(one) else ""
        rows.append(
            (*names, f"{one['before']:.4f}", f"{one['after']:.4f}", change, star, str(one["n"]), str(one["images"]))
        )
    return rich_table(head, rows)
