"""The page of a suite: one HTML file that needs no other, and the same in Markdown."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from dave_vit.analysis.suites import Suite
from dave_vit.environment import listed

Record = dict[str, Any]
_STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #b482c826; --accent: #8a4fa3; }
@media (prefers-color-scheme: dark) { :root { --accent: #cfa6de; } }
body { font: 16px/1.55 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 66rem; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; margin-top: 2.6rem; border-bottom: 2px solid var(--accent); padding-bottom: 0.2rem; }
a { color: var(--accent); } nav ul { columns: 18rem; padding-left: 1.2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: 0.4rem 0 1rem; font-size: 0.92rem; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr:nth-child(even) { background: var(--soft); }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
figcaption, .facts, .caption { font-size: 0.87rem; opacity: 0.8; } .caption { margin: 1rem 0 0; }
code { font-size: 0.9em; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Page:
    """What a report shows.

    Attributes:
        suite: that was run.
        records: of its sections, in their order.
        command: that ran it.
        figures: folder of their files.
    """

    suite: Suite
    records: Sequence[Record]
    command: str
    figures: Path


def markdown(page: Page) -> str:
    """The page in Markdown; figures are linked."""
    suite, records, figures = page.suite, page.records, page.figures
    lines = [f"# {_title(suite)}", "", *(f"- {name}: {value}" for name, value in _facts(page)), ""]
    lines += [f"- {note}" for note in suite.notes] + ([""] if suite.notes else [])
    for record in records:
        lines += [f"## {record['title']}", "", record["text"], ""]
        for table in record["tables"]:
            lines += [table["caption"], ""] if table["caption"] else []
            lines += [f"| {' | '.join(table['head'])} |", f"|{'---|' * len(table['head'])}"]
            lines += [f"| {' | '.join(row)} |" for row in table["rows"]] + [""]
        for picture in record["pictures"]:
            lines += [f"![{picture['name']}]({figures.name}/{picture['name']}.png)", "", _caption(record, picture), ""]
        lines += [] if record["pictures"] else [f"{_ran(record)}", ""]
    return "\n".join(lines)


def html(page: Page) -> str:
    """The page as one HTML file."""
    suite, records, figures = page.suite, page.records, page.figures
    facts = "".join(f"<li>{escape(name)}: {_code(name, value)}</li>" for name, value in _facts(page))
    notes = "".join(f"<p>{escape(note)}</p>" for note in suite.notes)
    links = "".join(f'<li><a href="#{one["name"]}">{escape(one["title"])}</a></li>' for one in records)
    sections = "".join(_section(record, figures) for record in records)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_title(suite))}</title><style>{_STYLE}</style>"
    )
    body = f"<h1>{escape(_title(suite))}</h1><ul>{facts}</ul>{notes}<nav><ul>{links}</ul></nav>{sections}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _title(suite: Suite) -> str:
    return f"DAVE, reproduced: suite {suite.name}{' (quick)' if suite.quick else ''}"


def _facts(page: Page) -> list[tuple[str, str]]:
    total = sum(record["seconds"] for record in page.records)
    return [
        ("command", page.command),
        ("models", ", ".join(f"{entry.label} ({entry.spec})" for entry in page.suite.models)),
        ("time", f"{total / 60:.1f} minutes, reports and loading left out"),
        ("device", "; ".join(dict.fromkeys(record["device"] for record in page.records))),
        ("versions", "; ".join(dict.fromkeys(listed(record["versions"]) for record in page.records))),
    ]


def _code(name: str, value: str) -> str:
    return f"<code>{escape(value)}</code>" if name == "command" else escape(value)


def _section(record: Record, figures: Path) -> str:
    parts = [f'<section id="{record["name"]}"><h2>{escape(record["title"])}</h2><p>{escape(record["text"])}</p>']
    parts += [_table(table) for table in record["tables"]]
    parts += [_figure(record, picture, figures) for picture in record["pictures"]]
    parts.append("" if record["pictures"] else f'<p class="facts">{escape(_ran(record))}</p>')
    return "".join(parts) + "</section>"


def _table(table: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in table["head"])
    rows = "".join(f"<tr>{''.join(f'<td>{_bold(word)}</td>' for word in row)}</tr>" for row in table["rows"])
    caption = f'<p class="caption">{escape(table["caption"])}</p>' if table["caption"] else ""
    return f'{caption}<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _bold(word: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(word))


def _figure(record: Record, picture: Mapping[str, Any], figures: Path) -> str:
    data = _webp((figures / f"{picture['name']}.png").read_bytes())
    source = f"data:image/webp;base64,{base64.b64encode(data).decode()}"
    alt = escape(f"{record['title']}: {picture['caption']}", quote=True)
    return (
        f'<figure><img alt="{alt}" src="{source}"><figcaption>{escape(_caption(record, picture))}</figcaption></figure>'
    )


def _webp(png: bytes) -> bytes:
    """The same picture in a third of the bytes."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(buffer, "webp", quality=88, method=6)
    return buffer.getvalue()


def _caption(record: Record, picture: Mapping[str, Any]) -> str:
    return f"{picture['caption']} {_ran(record)}"


def _ran(record: Record) -> str:
    return (
        f"Run: {listed(record['facts'])}; {record['seconds']:.0f} s on {record['device']}; "
        f"{listed(record['versions'])}; {record['command']}"
    )
