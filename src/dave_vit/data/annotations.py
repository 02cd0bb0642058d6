"""Read boxes from annotation files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from dave_vit.data.base import Box
from dave_vit.errors import DataError


def box(left: str | float, top: str | float, right: str | float, bottom: str | float) -> Box:
    """Return a box from text or numbers; raise ValueError where one is no finite number."""
    corners = float(left), float(top), float(right), float(bottom)
    if not all(map(math.isfinite, corners)):
        raise ValueError(f"corners {corners} are not finite")
    return corners


def read_text(path: Path) -> str:
    """Read a text file of a data set."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: no UTF-8 text (byte {error.start}); save it as UTF-8") from error


def read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and cells of each line that is not empty."""
    rows = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        yield from ((rows.line_num, row) for row in rows if row)
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: not a table with commas ({error})") from error


def read_objects(path: Path) -> list[tuple[str, Box]]:
    """Read names and boxes of the objects in an XML file in PASCAL VOC format, which ImageNet uses too."""
    corners = ("xmin", "ymin", "xmax", "ymax")
    try:
        objects = ElementTree.parse(path).getroot().findall("object")
        named = [(thing.findtext("name", "").strip(), thing.find("bndbox")) for thing in objects]
        return [(name, box(*(at.findtext(k, "") for k in corners))) for name, at in named if at is not None]
    except (ElementTree.ParseError, ValueError, OSError):
        raise DataError(f"{path}: expected an <annotation> with <object>, <name> and <bndbox>") from None
