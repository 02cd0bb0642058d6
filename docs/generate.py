"""Writes the parts of the documentation that come from the code: `python docs/generate.py`.

These are the command-line reference and the table of methods. A test compares the files with what this would write.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

DOCS = Path(__file__).resolve().parent
TABLE = ("<!-- table: written by docs/generate.py -->", "<!-- end of table -->")


def cli_reference() -> str:
    """The page of all commands, out of the commands themselves."""
    from dave_vit.cli import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("dave", ["--help"], resilient_parsing=True)
    lines = [
        "# Command line",
        "",
        "Written by `python docs/generate.py` out of the commands themselves.",
        "",
        "Exit codes: 0 where all went well; 2 after an error that you can repair, told in one line on standard error;",
        "130 after Ctrl-C.",
        "",
    ]
    for name in group.list_commands(context):
        lines += _command(group.get_command(context, name), name, context)
    return "\n".join(lines)


def _command(command: Any, name: str, parent: Any, heading: str = "##") -> Iterator[str]:
    context = type(parent)(command, info_name=name, parent=parent)
    yield from (f"{heading} {context.command_path}", "")
    yield from (_text(command.help), "", "```text")
    yield " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield from ("```", "")
    yield from _parameters(command, context)
    if command.epilog:
        examples = [line.strip() for line in command.epilog.splitlines() if line.startswith("  ")]
        yield from ("Examples:", "", "```bash", *examples, "```", "")
    for inner in getattr(command, "list_commands", lambda _: [])(context):
        yield from _command(command.get_command(context, inner), inner, context, heading + "#")


def _parameters(command: Any, context: Any) -> Iterator[str]:
    command.get_help(context)  # fills in the names of the registries
    records = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    records = [record for record in records if "--help" not in record[0]]
    if not records:
        return
    yield from ("| argument or option | meaning |", "|---|---|")
    for names, text in records:
        yield f"| {_code(names)} | {_cell(text)} |"
    yield ""


def _text(help_text: str | None) -> str:
    return (help_text or "").replace("\b", "").strip()


def _code(text: str) -> str:
    # Within backticks, readers of Markdown disagree on how a bar is kept from ending the cell.
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def methods_table() -> str:
    """What `dave methods` knows, as Markdown."""
    from dave_vit.methods import METHODS

    rows = ["| method | what it shows | published | passes | map per | by class |", "|---|---|---|---|---|---|"]
    for name in sorted(METHODS, key=lambda name: METHODS[name].__module__ != "dave_vit.methods.dave"):
        info = METHODS[name].info
        cells = (f"`{name}`", info.summary, info.paper, info.passes, info.resolution)
        rows.append(f"| {' | '.join(map(_cell, cells))} | {'yes' if info.class_specific else 'no'} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """A page with the table of methods between its two marks."""
    before, rest = page.split(TABLE[0])
    return f"{before}{TABLE[0]}\n\n{methods_table()}\n\n{TABLE[1]}{rest.split(TABLE[1])[1]}"


_MODELS = """# Models

<!-- Measured by `python docs/check_models.py`, written by `python docs/generate.py`; do not edit. -->

Every line is the result of a check. The architecture is built by its own library, made small where possible, with
random parameters in float64, and the conservation identity is added up: the logit must equal `<W, x>` plus the parts of
all additive constants. *Gap* is the rest, relative to `<W, x>`. *Forward* is the difference between logits under the
interception and the model's own, in float32.

**exact** means a gap below 1e-09. **unsupported** means that the model is [refused](refusals.md). Check a
model that is not listed with `dave doctor --model SPEC`.

Checked with {versions}: {exact} architectures exact, {unsupported} unsupported.
"""
_LIBRARY = """
## {library}

| family | architecture | state | gap | forward |
|---|---|---|---|---|
"""


def models_page() -> str:
    """The page of the architectures that were checked."""
    from dave_vit.checks.architectures import checked_architectures, library_versions

    rows = checked_architectures()
    counts = {state: sum(row.state == state for row in rows) for state in ("exact", "unsupported")}
    head = _MODELS.format(versions=", ".join(f"{name} {one}" for name, one in library_versions().items()), **counts)
    tables = [
        _LIBRARY.format(library=library) + "".join(map(_model_row, group))
        for library, group in groupby(rows, key=lambda row: row.library)
    ]
    # What a message advises after the colon is on the page of refusals.
    reasons = [
        f"- **{row.family}** (`{row.architecture}`): {row.reason.partition(': ')[0]}\n" for row in rows if row.reason
    ]
    return head + "".join(tables) + "\n## Why some are unsupported\n\n" + "".join(reasons)


def _model_row(row: Any) -> str:
    values = ("" if value is None else f"{value:.0e}" if value else "0" for value in (row.gap, row.forward_difference))
    return f"| {' | '.join((row.family, f'`{row.architecture}`', row.state, *values))} |\n"


def pages() -> dict[Path, str]:
    """Every generated page with its whole text."""
    methods = DOCS / "methods.md"
    return {
        DOCS / "reference" / "cli.md": cli_reference(),
        methods: with_table(methods.read_text(encoding="utf-8")),
        DOCS / "models.md": models_page(),
    }


def main() -> None:
    """Writes what has changed, and names it."""
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(DOCS.parent)}\n")


if __name__ == "__main__":
    main()
