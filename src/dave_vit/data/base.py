"""What a data set is: numbered images with labels, and regions where they are known."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dave_vit.data.images import SUFFIXES, check_size, to_rgb
from dave_vit.errors import DataError, ImageError, OptionError, escape_unprintable, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[float, float, float, float]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a data set, without its pixels.

    Attributes:
        name: unique in the data set.
        label: class index, or None where it is unknown.
        boxes: of the label's objects: left, top, right, bottom in pixels of the original image, edges at integers.
        file: where the pixels are, relative to the data set, or "" where they are composed.
        mask: file of the label's mask, relative to the data set, or "".
        picture: what items that show one picture have in common, where several do.
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
    """Items by number; pixels are read when they are asked for, so that memory does not grow with the images.

    Attributes:
        class_names: by label; may be empty.
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
        """A hash of what the data set holds, the same wherever it lies; without reading the pixels."""

    @abstractmethod
    def image(self, index: int) -> Image:
        """The picture, RGB; raises ImageError where it cannot be read."""

    def mask(self, index: int) -> Mask | None:
        """The label's object pixel by pixel, [H,W] as the picture, where the data set knows it."""
        return None


class FileDataset(Dataset):
    """A data set whose pictures are files under one folder.

    Args:
        root: the folder.

    Attributes:
        items: what is known of each image.
    """

    items: list[Item]

    def __init__(self, root: str | Path) -> None:
        if not str(root):
            raise OptionError("no folder of data is named; write it behind the colon, such as folder:DIR")
        self.root = Path(root)
        if not self.root.is_dir():
            raise DataError(f"{self.root}: no such folder; give the folder of the data set")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]

    def digest(self) -> str:
        """A hash of names, labels, boxes and file sizes."""
        known = hashlib.sha256()
        for item in self.items:
            files = [file for file in (item.file, item.mask) if file]
            sizes = [path.stat().st_size if (path := self.root / file).exists() else -1 for file in files]
            known.update(repr((item.name, item.label, item.boxes, sizes)).encode())
        return known.hexdigest()

    def image(self, index: int) -> Image:
        """The picture, RGB."""
        return to_rgb(_read(self.root / self.items[index].file))[0]

    def mask(self, index: int) -> Mask | None:
        """Where the mask file is not black, if the item has one."""
        file = self.items[index].mask
        return np.asarray(_read(self.root / file).convert("L")) > 0 if file else None


def image_files(folder: Path) -> list[Path]:
    """Images directly in a folder, sorted; hidden files are left out."""
    entries = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in entries if path.suffix.lower() in SUFFIXES)


def _read(path: Path) -> Image:
    """As stored: neither annotations nor published accuracies heed the orientation tag."""
    from PIL import Image as images

    try:
        with images.open(path) as picture:
            check_size(picture.size, path.name)
            picture.load()
            return picture
    except ImageError:
        raise
    except Exception as error:  # decoders meet damaged bytes with any exception
        raise ImageError(f"{path.name}: not an image that can be read ({first_line(error)})") from error
