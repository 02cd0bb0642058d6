"""Parts of reports: tables, figures, and sections with the outcome of one analysis."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dave_vit._internal.atomic_files import json_bytes, write_files
from dave_vit.viz.figures import Drawing

Number = str | int | float | None


@dataclass(frozen=True)
class ReportTable:
    """A table of texts.

    Attributes:
        head: titles of the columns.
        rows: one text per column.
        caption: text above the table.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class TableCell:
    """Cell of a detailed table: its text, a detail in smaller print, and whether it is the best of its column."""

    text: str
    detail: str = ""
    is_best: bool = False

    def format(self, *, bold: bool = False, brief: bool = False) -> str:
        """Return one text; the best one in bold, without the detail if brief."""
        text = f"**{self.text}**" if bold and self.is_best else self.text
        return text if brief or not self.detail else f"{text} {self.detail}"


@dataclass(frozen=True)
class Column:
    """Column of a detailed table: a title with a detail in smaller print and a tooltip, and a cell per row."""

    title: str
    cells: Sequence[TableCell]
    detail: str = ""
    tooltip: str = ""


@dataclass(frozen=True)
class DetailedTable:
    """A table whose cells have details, which some outputs show below the text and others beside it or not at all."""

    columns: Sequence[Column]
    caption: str = ""

    @property
    def rows(self) -> list[tuple[TableCell, ...]]:
        """Cells row by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    def format(self, *, bold: bool = False, brief: bool = False) -> ReportTable:
        """Return the table as texts: the best cells in bold, cells without details if brief."""
        head = (f"{one.title} ({one.detail})" if one.detail else one.title for one in self.columns)
        rows = (tuple(cell.format(bold=bold, brief=brief) for cell in row) for row in self.rows)
        return ReportTable(tuple(head), tuple(rows), self.caption)


def estimate_cell(
    mean: float | None, low: float | None, high: float | None, *, digits: int = 3, note: str = "", is_best: bool = False
) -> TableCell:
    """Return a cell with a mean and its interval, if any: "0.512" and "[0.498, 0.526]"; "-" if there is no mean."""
    if mean is None:
        return TableCell("-", note.strip())
    interval = "" if low is None else f"[{low:.{digits}f}, {high:.{digits}f}]"
    return TableCell(f"{mean:.{digits}f}", f"{interval}{note}".strip(), is_best)


@dataclass(frozen=True)
class ReportFigure:
    """A figure with its caption.

    Attributes:
        name: name of its files, without ending.
        drawing: the figure itself.
        caption: text below the figure.
        is_plot: whether it consists of lines and text, and is saved as SVG too.
    """

    name: str
    drawing: Drawing
    caption: str
    is_plot: bool = True

    def files(self) -> dict[str, bytes]:
        """Return the content of its files by name."""
        files = {f"{self.name}.png": self.drawing.to_bytes("png", dpi=110)}
        return files | ({f"{self.name}.svg": self.drawing.to_bytes("svg")} if self.is_plot else {})


@dataclass(frozen=True)
class Section:
    """The outcome of one analysis.

    Attributes:
        name: name of its files, without ending.
        title: heading.
        text: what was done and what came out, in sentences.
        facts: what was run: images, samples, seed and so on.
        tables: tables to read.
        rows: all numbers for the CSV file, mappings with the same keys.
        pictures: figures.
    """

    name: str
    title: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[ReportTable] = ()
    rows: Sequence[Mapping[str, Number]] = ()
    pictures: Sequence[ReportFigure] = ()

    def record(self) -> dict[str, Any]:
        """Return everything but the pixels, ready for JSON."""
        return {
            **vars(self),
            "facts": dict(self.facts),
            "tables": [asdict(table) for table in self.tables],
            "rows": [dict(row) for row in self.rows],
            "pictures": [{"name": one.name, "caption": one.caption, "is_plot": one.is_plot} for one in self.pictures],
        }

    def files(self, figures: Path, table: Path) -> dict[Path, bytes]:
        """Return its files by path: figures in a folder, and rows, if there are any, as a table."""
        files = {figures / name: data for picture in self.pictures for name, data in picture.files().items()}
        return files | ({table: csv_bytes(self.rows)} if self.rows else {})

    def write(self, folder: Path) -> list[Path]:
        """Write figures, CSV and JSON, the JSON last; return their paths in this order."""
        record = folder / f"{self.name}.json"
        files = self.files(folder, folder / f"{self.name}.csv")
        write_files({record: json_bytes(self.record()), **files})  # the record, named first, appears last
        return [*files, record]


def csv_bytes(rows: Sequence[Mapping[str, Number]]) -> bytes:
    """Return the content of a CSV file of rows that share their keys."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
