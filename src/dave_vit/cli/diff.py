"""`dave diff`: what changed from one run, or one audit, to another."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dave_vit.cli.common import Output, command, rich_table
from dave_vit.cli.options import flag
from dave_vit.errors import OptionError


@command(
    "dave diff run-before run-after",
    "dave diff run run --pair dave=dave-paper",
    "dave diff audit-before audit-after --json",
)
def diff(
    *,
    before: Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder of dave evaluate or dave audit.")],
    after: Annotated[Path, typer.Argument(metavar="RUN_B", help="Folder of the same kind that is compared with it.")],
    pair: Annotated[
        list[str] | None, flag("--pair A=B", "Compare a method of the first run with one of the second; repeatable.")
    ] = None,
    output: Output,
) -> None:
    """Compare two runs, the second minus the first, on the images that both scored; or the findings of two audits.

    Differences of six or more images have 95 % intervals; only grids that both runs have are compared. Runs need
    not be finished, and a run can be compared with itself, method with method. Audits are compared class by class.
    """
    if (before / "audit.json").exists() and not pair:
        output.json(show_audit_changes(before, after, output))
        return
    from dave_vit.evaluate.statistics.intervals import describe_comparisons
    from dave_vit.evaluate.statistics.summary import compare_runs, describe_changes, pair_methods, read_run

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


def show_audit_changes(before: Path, after: Path, output: Output) -> dict[str, Any]:
    """Print what changed from one audit to another, and return it."""
    from dave_vit.audit.report import compare_audits, describe_settings, read_audit

    first, second = read_audit(before), read_audit(after)
    rows, settings = compare_audits(first, second), list(describe_settings(first, second))
    changed = [row for row in rows if row["verdict"]]
    output.print(*(f"  {line}" for line in settings))
    head = ("class", "before", "after", "change of log odds", "")
    table = rich_table(head, [_audit_row(row) for row in changed])
    output.print(table if changed else "nothing is confirmed in either")
    output.print(f"  {len(rows) - len(changed)} other classes have no confirmed finding in either audit")
    return {"changes": settings, "classes": rows}


def _audit_row(row: dict[str, Any]) -> tuple[str, ...]:
    cells = (_finding_cell(row["before"]), _finding_cell(row["after"]))
    change = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*row["change"]) if row["change"] else ""
    return row["class"], *cells, change, row["verdict"]


def _finding_cell(finding: dict[str, Any] | None) -> str:
    if finding is None:
        return "not audited"
    return f"{finding['effect'][0]:.2f} {finding['region'] if finding['confirmed'] else 'not confirmed'}"


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
        means, sizes = (f"{one['before']:.4f}", f"{one['after']:.4f}"), (str(one["n"]), str(one["images"]))
        rows.append((*names, *means, change, star, *sizes))
    return rich_table(head, rows)
