"""Write the parts of the documentation that come from the code: `python docs/generate.py [--notebooks]`.

These are the command-line reference and the table of methods, which a test compares with the files. With --notebooks
it also runs the notebooks and stores their outputs.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

DOCS = Path(__file__).resolve().parent
TABLE = ("<!-- table: written by docs/generate.py -->", "<!-- end of table -->")


def cli_reference() -> str:
    """Return the page of all commands, made from the commands themselves."""
    from dave_vit.cli import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("dave", ["--help"], resilient_parsing=True)
    lines = [
        "# Command line",
        "",
        "Written by `python docs/generate.py` from the commands themselves.",
        "",
        "Exit codes: 0 for success, 2 after an error that you can fix (one line on standard error), 130 after Ctrl-C.",
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
    # Markdown renderers disagree on how to escape a bar inside backticks.
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def methods_table() -> str:
    """Return the table of `dave methods` as Markdown."""
    from dave_vit.methods import METHODS

    rows = ["| method | what it shows | published | passes | map per | by class |", "|---|---|---|---|---|---|"]
    for name in sorted(METHODS, key=lambda name: METHODS[name].__module__ != "dave_vit.methods.dave"):
        info = METHODS[name].info
        cells = (f"`{name}`", info.summary, info.paper, info.passes, info.resolution)
        rows.append(f"| {' | '.join(map(_cell, cells))} | {'yes' if info.class_specific else 'no'} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """Return a page with the table of methods between its two marks."""
    before, rest = page.split(TABLE[0])
    return f"{before}{TABLE[0]}\n\n{methods_table()}\n\n{TABLE[1]}{rest.split(TABLE[1])[1]}"


_MODELS = """# Models

<!-- Measured by `python docs/check_models.py`, written by `python docs/generate.py`; do not edit. -->

Every line is the result of a check. The architecture is built by its own library, made small where possible, with
random parameters in float64. *Gap* is what is missing from the
[conservation identity](concepts.md#the-effective-transformation-w), relative to `<W, x>`; *default* is the gap of the
rules that DAVE averages by default, on a photograph. *Forward* is the difference between logits under the interception
and the model's own, in float32.

**exact** means gaps below 1e-09, **unsupported** that the model is [refused](refusals.md). Check other models with
`dave doctor --model SPEC`.

Checked with {versions}: {exact} architectures exact, {unsupported} unsupported.
"""
_OTHER_FIELDS = """
## Pathology and remote sensing

These backbones have architectures of the tables above. Means, deviations and channels come with their weights or are
given: `--mean`, `--std`, `--size`. Without a head, explain a similarity (`--score similarity:FILE`) or
[train a head](howto/fine-tuned.md) with `dave probe`. Images of more than three channels are tensors in Python:
`DAVE(model).attribute(images)` with images `[B, 13, H, W]`, for instance.

| field | model | loaded as |
|---|---|---|
| pathology | UNI | `timm:hf-hub:MahmoodLab/UNI` |
| pathology | H-optimus-0 | `timm:hf-hub:bioptimus/H-optimus-0` |
| pathology | Prov-GigaPath, tiles | `timm:hf-hub:prov-gigapath/prov-gigapath` |
| pathology | Phikon, Phikon-v2 | `hf:owkin/phikon`, `hf:owkin/phikon-v2` |
| pathology | PLIP | `hf:vinid/plip` |
| pathology | QuiltNet | `openclip:hf-hub:wisdomik/QuiltNet-B-32` |
| biomedicine | BiomedCLIP | `openclip:hf-hub:microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224` |
| remote sensing | RemoteCLIP, GeoRSCLIP | `openclip:ViT-B-32` with `--weights FILE` |
| remote sensing | SSL4EO-S12, Sentinel-2 | `timm.create_model("vit_small_patch16_224", in_chans=13)` with its weights |

The architectures were checked, these weights were not. Models with code of their own, such as CONCH, Prithvi or Clay,
are [modules](howto/own-model.md).
"""
_LIBRARY = """
## {library}

| family | architecture | state | gap | default | forward |
|---|---|---|---|---|---|
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
    return head + "".join(tables) + _OTHER_FIELDS + "\n## Why some are unsupported\n\n" + "".join(reasons)


def _model_row(row: Any) -> str:
    numbers = (row.gap, row.default_gap, row.forward_difference)
    values = ("" if value is None else f"{value:.0e}" if value else "0" for value in numbers)
    return f"| {' | '.join((row.family, f'`{row.architecture}`', row.state, *values))} |\n"


def pages() -> dict[Path, str]:
    """Return every generated page with its whole text."""
    methods = DOCS / "methods.md"
    return {
        DOCS / "reference" / "cli.md": cli_reference(),
        methods: with_table(methods.read_text(encoding="utf-8")),
        DOCS / "models.md": models_page(),
    }


def _compress_picture(data: dict[str, Any]) -> None:
    """Replace a PNG among the data of an output by a JPEG, which takes a fifth of the space."""
    from PIL import Image

    if png := data.pop("image/png", None):
        buffer = io.BytesIO()
        with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
            picture.convert("RGB").save(buffer, "jpeg", quality=85, optimize=True)
        data["image/jpeg"] = base64.b64encode(buffer.getvalue()).decode()


def run_notebooks() -> None:
    """Run every notebook in place and store its outputs."""
    import nbformat
    from nbclient import NotebookClient

    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=600, record_timing=False).execute()
        for cell in notebook.cells:
            cell.metadata.clear()
            for output in cell.get("outputs", []):
                _compress_picture(output.get("data", {}))
        notebook.metadata.language_info = {"name": "python"}  # not the version of the machine that ran it
        nbformat.write(notebook, path)
        sys.stdout.write(f"ran {path.relative_to(DOCS.parent)}\n")


def main() -> None:
    """Write the pages that have changed, and print their names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notebooks", action="store_true", help="run the notebooks and store their outputs")
    if parser.parse_args().notebooks:
        run_notebooks()
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(DOCS.parent)}\n")


if __name__ == "__main__":
    main()
