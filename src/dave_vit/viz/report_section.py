"""What an analysis hands over: words, tables, numbers and figures; the same for commands and for reports."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dave_vit._internal.atomic_files import json_bytes, write_files

if TYPE_CHECKING:
    from dave_vit.viz import Drawing

Number = str | int | float | None


@dataclass(frozen=True)
class ReportTable:
    """A table for people: words in all cells.

    Attributes:
        head: of the columns.
        rows: one word per column.
        caption: above it.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class ReportFigure:
    """A figure and what it shows.

    Attributes:
        name: of its files.
        drawing: the figure itself.
        caption: below it.
        is_plot: lines and words, which are kept as SVG too, rather than pictures made of pixels.
    """

    name: str
    drawing: Drawing
    caption: str
    is_plot: bool = True

    def files(self) -> dict[str, bytes]:
        """Contents by name."""
        files = {f"{self.name}.png": self.drawing.to_bytes("png", dpi=110)}
        return files | ({f"{self.name}.svg": self.drawing.to_bytes("svg")} if self.is_plot else {})


@dataclass(frozen=True)
class Section:
    """The outcome of one analysis.

    Attributes:
        name: of its files.
        title: what it is about.
        text: what was done and what was found, in sentences.
        facts: what was run: images, samples, seed and the like.
        tables: for people.
        rows: all numbers, one mapping each with the same keys; they become the CSV file.
        pictures: its figures.
    """

    name: str
    title: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[ReportTable] = ()
    rows: Sequence[Mapping[str, Number]] = ()
    pictures: Sequence[ReportFigure] = ()

    def record(self) -> dict[str, Any]:
        """All but the pixels, ready for JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "text": self.text,
            "facts": dict(self.facts),
            "tables": [asdict(table) for table in self.tables],
            "rows": [dict(row) for row in self.rows],
            "pictures": [{"name": one.name, "caption": one.caption, "is_plot": one.is_plot} for one in self.pictures],
        }

    def write(self, folder: Path) -> list[Path]:
        """Writes figures, CSV and JSON, the JSON last; returns their paths in this order."""
        record = folder / f"{self.name}.json"
        files = {record: json_bytes(self.record())}  # named first, it appears last
        files |= {folder / name: data for picture in self.pictures for name, data in picture.files().items()}
        if self.rows:
            files[folder / f"{self.name}.csv"] = csv_bytes(self.rows)
        write_files(files)
        return [*(path for path in files if path != record), record]


def csv_bytes(rows: Sequence[Mapping[str, Number]]) -> bytes:
    """A CSV file of rows that share their keys."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
