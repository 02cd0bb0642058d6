"""Boxes as annotation files write them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from dave_vit.data.base import Box
from dave_vit.errors import DataError


def box(left: str | float, top: str | float, right: str | float, bottom: str | float) -> Box:
    """A box from text or numbers; ValueError where one is no number."""
    return float(left), float(top), float(right), float(bottom)


def read_objects(path: Path) -> list[tuple[str, Box]]:
    """Names and boxes of the objects in an XML file of PASCAL VOC's form, which ImageNet's files have as well."""
    corners = ("xmin", "ymin", "xmax", "ymax")
    try:
        objects = ElementTree.parse(path).getroot().findall("object")
        named = [(thing.findtext("name", "").strip(), thing.find("bndbox")) for thing in objects]
        return [(name, box(*(at.findtext(k, "") for k in corners))) for name, at in named if at is not None]
    except (ElementTree.ParseError, ValueError, OSError):
        raise DataError(f"{path}: expected an <annotation> with <object>, <name> and <bndbox>") from None
