"""Data sets: indexed images with labels, and boxes or masks where they are known; readers of their annotations."""

import csv
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from dave_vit._internal.content_hash import hash_content, hash_files
from dave_vit.data.images import SUFFIXES, load_pixels, to_rgb
from dave_vit.errors import DataError, ImageError, OptionError, escape_unprintable

Box = tuple[float, float, float, float]
Mask = npt.NDArray[np.bool_]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a data set, without its pixels.

    Attributes:
        name: unique in the data set.
        label: class index, or None where it is unknown.
        boxes: of the label's objects: left, top, right, bottom in pixels of the original image.
        file: path of the image, relative to the data set; "" where it is composed.
        mask: path of the label's mask, relative to the data set, or "".
        picture: name of the image where several items show the same one.
    """

    name: str
    label: int | None
    boxes: tuple[Box, ...] = ()
    file: str = ""
    mask: str = ""
    picture: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", escape_unprintable(self.name))  # for tables; the file keeps its own
        object.__setattr__(self, "picture", escape_unprintable(self.picture))


class Dataset(ABC):
    """Items by index; pixels are read on access, so memory does not grow with the number of images.

    Attributes:
        class_names: names by label; may be empty.
    """

    class_names: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Item: ...

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    @abstractmethod
    def digest(self) -> str:
        """Return a hash of the contents that does not depend on the location."""

    @abstractmethod
    def image(self, index: int) -> Image:
        """Return the RGB image; raise ImageError where it cannot be read."""

    def mask(self, index: int) -> Mask | None:
        """Return the mask ``[H, W]`` of the label's object, or None where it is unknown."""
        return None


class FileDataset(Dataset):
    """A data set of image files in one folder.

    Args:
        root: the folder.

    Attributes:
        items: one per image, or per image and class.
    """

    items: list[Item]

    def __init__(self, root: str | Path) -> None:
        if not str(root):
            raise OptionError("data set without a folder; write it after the colon, such as folder:DIR")
        self.root = Path(root)
        if not self.root.is_dir():
            raise DataError(f"{self.root}: no such folder; give the folder of the data set")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]

    def digest(self) -> str:
        """Return a hash of names, labels, boxes and the bytes of files."""
        files = hash_files(self.root / file for item in self.items for file in (item.file, item.mask) if file)
        items = [[item.name, item.label, item.boxes, item.mask is not None] for item in self.items]
        return hash_content([items, files])

    def image(self, index: int) -> Image:
        """Return the RGB image."""
        return to_rgb(_read(self.root / self.items[index].file))[0]

    def mask(self, index: int) -> Mask | None:
        """Return where the mask file is not black, or None without a mask file."""
        file = self.items[index].mask
        return np.asarray(_read(self.root / file).convert("L")) > 0 if file else None


def image_files(folder: Path) -> list[Path]:
    """Return the images directly in a folder, sorted, without hidden files."""
    entries = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in entries if path.suffix.lower() in SUFFIXES)


def find_first(root: Path, names: Sequence[str]) -> Path | None:
    """Return the first of these files or folders that exists, or None."""
    return next((root / name for name in names if (root / name).exists()), None)


def _read(path: Path) -> Image:
    """Read an image as stored: neither annotations nor published accuracies use the orientation tag."""
    try:
        return load_pixels(path.read_bytes(), path.name)
    except OSError as error:
        raise ImageError(f"{path.name}: cannot be read ({error.strerror})") from error


def box(left: str | float, top: str | float, right: str | float, bottom: str | float) -> Box:
    """Return a box from text or numbers; raise ValueError where one is no finite number."""
    corners = float(left), float(top), float(right), float(bottom)
    if not all(map(math.isfinite, corners)):
        raise ValueError(f"corners {corners} are not finite")
    return corners


def group_boxes(boxes: Iterable[tuple[Key, Box]]) -> dict[Key, tuple[Box, ...]]:
    """Return the boxes of each key, such as an image or a class."""
    groups: dict[Key, tuple[Box, ...]] = {}
    for key, at in boxes:
        groups[key] = (*groups.get(key, ()), at)
    return groups


def read_text(path: Path) -> str:
    """Read a text file of a data set."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


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
