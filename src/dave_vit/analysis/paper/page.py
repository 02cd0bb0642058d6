"""The report of a suite: one self-contained HTML file, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from dave_vit._internal.environment import format_facts
from dave_vit.analysis.paper.suites import Suite
from dave_vit.viz.pages import render

Record = dict[str, Any]
"""A section as JSON, with its key, command, device, versions and seconds."""


def render_report(kind: str, suite: Suite, records: Sequence[Record], command: str, figures: Path) -> str:
    """Render the report of a suite.

    Args:
        kind: "md", with links to figures, or "html", with figures inside.
        suite: the suite that was run.
        records: its sections, in their order.
        command: the command that ran it.
        figures: folder of the figures' files.
    """
    return render(
        f"suite.{kind}",
        title=f"DAVE, reproduced: suite {suite.name}{' (quick)' if suite.quick else ''}",
        facts=_facts(suite, records, command),
        notes=suite.notes,
        records=records,
        figures=figures.name,
        figure=lambda picture: Image.open(figures / f"{picture['name']}.png"),
        ran=_format_run,
    )


def _facts(suite: Suite, records: Sequence[Record], command: str) -> list[tuple[str, str]]:
    total = sum(record["seconds"] for record in records)
    return [
        ("command", command),
        ("models", ", ".join(f"{entry.label} ({entry.spec})" for entry in suite.models)),
        ("time", f"{total / 60:.1f} minutes, reports and loading left out"),
        ("device", "; ".join(dict.fromkeys(record["device"] for record in records))),
        ("versions", "; ".join(dict.fromkeys(format_facts(record["versions"]) for record in records))),
    ]


def _format_run(record: Record) -> str:
    """Describe how a section was computed."""
    return (
        f"Run: {format_facts(record['facts'])}; {record['seconds']:.0f} s on {record['device']}; "
        f"{format_facts(record['versions'])}; {record['command']}"
    )
