"""The ImageNet validation set in its usual folder layouts.

Images lie in one folder or in one folder per class; labels and boxes come from Kaggle's `LOC_val_solution.csv` or from
the XML files of `ILSVRC2012_bbox_val_v3`; classes are numbered as in `LOC_synset_mapping.txt`.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from dave_vit.data.base import Box, FileDataset, Item, box, find_first, image_files, read_csv, read_objects, read_text
from dave_vit.data.sets import DATASETS
from dave_vit.errors import DataError

_IMAGE_FOLDERS = (".", "images", "val", "ILSVRC2012_img_val", "ILSVRC/Data/CLS-LOC/val", "Data/CLS-LOC/val")
_TABLES = ("LOC_val_solution.csv", "../LOC_val_solution.csv")
_SYNSETS = ("LOC_synset_mapping.txt", "../LOC_synset_mapping.txt")
_XML_FOLDERS = (
    "ILSVRC2012_bbox_val_v3/val",
    "ILSVRC2012_bbox_val_v3",
    "bbox_val_v3",
    "ILSVRC/Annotations/CLS-LOC/val",
    "Annotations/CLS-LOC/val",
    "Annotations",
)
_WNID = re.compile(r"n\d{8}")


_Annotation = tuple[str, tuple[Box, ...]]
"""Class and boxes of an image."""


@DATASETS.register("imagenet")
class ImageNet(FileDataset):
    """Validation images with labels and, where annotations are present, the boxes of the label's objects.

    Args:
        root: the folder; its layout is detected.
        limit: use at most this many images, sorted by name.
    """

    def __init__(self, root: str | Path, limit: int | None = None) -> None:
        super().__init__(root)
        names = _synsets(self.root)
        number = {wnid: index for index, wnid in enumerate(names)}
        self.class_names = list(names.values())
        self.items, self.unlabelled = [], 0
        annotate = _open_annotations(self.root)
        for path in _images(self.root):
            if limit is not None and len(self.items) == limit:
                break
            folder = path.parent.name if _WNID.fullmatch(path.parent.name) else ""
            named, boxes = annotate(path.stem, folder)
            wnid = folder or named
            if not wnid:
                self.unlabelled += 1
                continue
            if wnid not in number:
                raise DataError(f"{path.name}: class {wnid!r} is not one of the {len(number)} classes of ImageNet")
            file = path.relative_to(self.root).as_posix()  # files of one stem may lie in several folders
            self.items.append(Item(file, number[wnid], boxes, file))
        if not self.items:
            looked = "LOC_val_solution.csv, class folders such as n01440764, or ILSVRC2012_bbox_val_v3 XML files"
            raise DataError(f"{self.root}: {self.unlabelled} images and no label for any; looked for {looked}")


def _open_annotations(root: Path) -> Callable[[str, str], _Annotation]:
    """Return a function of an image's name and class (where its folder names one): from the table, or XML files."""
    path, folder = find_first(root, _TABLES), find_first(root, _XML_FOLDERS)
    table = dict(read_table(path)) if path else {}

    def annotate(name: str, wnid: str) -> _Annotation:
        files = (folder / f"{name}.xml", folder / wnid / f"{name}.xml") if folder and not path else ()
        file = next((file for file in files if file.is_file()), None)
        return read_xml(file, wnid) if file else table.get(name, ("", ()))

    return annotate


def read_table(path: Path) -> Iterator[tuple[str, _Annotation]]:
    """Read names and annotations of Kaggle's table: ``ImageId,PredictionString`` with ``wnid x0 y0 x1 y1 ...``."""
    for number, row in read_csv(path):
        if row[0] == "ImageId":
            continue
        words = row[1].split() if len(row) == 2 else []
        try:
            if not words or len(words) % 5:
                raise ValueError
            boxes = [(words[i], box(*words[i + 1 : i + 5])) for i in range(0, len(words), 5)]
        except ValueError:
            raise DataError(f"{path.name}, line {number}: expected 'name,wnid x0 y0 x1 y1 ...', got {row}") from None
        yield row[0], (words[0], tuple(at for wnid, at in boxes if wnid == words[0]))


def read_xml(path: Path, wnid: str = "") -> _Annotation:
    """Read label and boxes of an annotation file; the first object's class where ``wnid`` is not given."""
    objects = read_objects(path)
    if not objects:
        raise DataError(f"{path}: expected an <annotation> with <object>, <name> and <bndbox>")
    wnid = wnid or objects[0][0]
    return wnid, tuple(at for name, at in objects if name == wnid)


def _synsets(root: Path) -> dict[str, str]:
    """Return names by wnid in the order of the class indices; from timm where the data set has no list."""
    path = find_first(root, _SYNSETS)
    if path is None:
        from timm.data import ImageNetInfo

        info = ImageNetInfo()
        return {wnid: info.label_name_to_description(wnid) for wnid in info.label_names()}
    rows = (line.split(" ", 1) for line in read_text(path).splitlines() if line.strip())
    return {row[0]: row[-1] for row in rows}


def _images(root: Path) -> list[Path]:
    """Return all images, sorted by name, of the first folder that has some, or of its class folders."""
    for name in _IMAGE_FOLDERS:
        folder = root / name
        if not folder.is_dir():
            continue
        classes = [sub for sub in folder.iterdir() if sub.is_dir() and _WNID.fullmatch(sub.name)]
        paths = [path for sub in classes for path in image_files(sub)] or image_files(folder)
        if paths:
            return sorted(paths, key=lambda path: (path.stem, path))
    raise DataError(f"{root}: no images; looked in {', '.join(_IMAGE_FOLDERS)} and in class folders there")
