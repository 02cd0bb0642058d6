"""The page of a suite: one HTML file that needs no other, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from dave_vit._internal.environment import format_facts
from dave_vit.analysis.paper.suites import Suite
from dave_vit.viz.pages import render

Record = dict[str, Any]


@dataclass(frozen=True)
class SuitePage:
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

    def figure(self, picture: Mapping[str, Any]) -> Image.Image:
        """The pixels of a figure."""
        return Image.open(self.figures / f"{picture['name']}.png")


def markdown(page: SuitePage) -> str:
    """The page in Markdown; figures are linked."""
    return render("suite.md", **_content(page))


def html(page: SuitePage) -> str:
    """The page as one HTML file."""
    return render("suite.html", **_content(page))


def _content(page: SuitePage) -> dict[str, Any]:
    suite = page.suite
    return {
        "title": f"DAVE, reproduced: suite {suite.name}{' (quick)' if suite.quick else ''}",
        "facts": _facts(page),
        "notes": suite.notes,
        "records": page.records,
        "figures": page.figures.name,
        "figure": page.figure,
        "ran": _ran,
    }


def _facts(page: SuitePage) -> list[tuple[str, str]]:
    total = sum(record["seconds"] for record in page.records)
    return [
        ("command", page.command),
        ("models", ", ".join(f"{entry.label} ({entry.spec})" for entry in page.suite.models)),
        ("time", f"{total / 60:.1f} minutes, reports and loading left out"),
        ("device", "; ".join(dict.fromkeys(record["device"] for record in page.records))),
        ("versions", "; ".join(dict.fromkeys(format_facts(record["versions"]) for record in page.records))),
    ]


def _ran(record: Record) -> str:
    """How a section was made."""
    return (
        f"Run: {format_facts(record['facts'])}; {record['seconds']:.0f} s on {record['device']}; "
        f"{format_facts(record['versions'])}; {record['command']}"
    )
