"""Data sets of class folders, with optional boxes in a table or masks as images."""

from pathlib import Path

from dave_vit.data.base import Box, FileDataset, Item, box, group_boxes, image_files, read_csv
from dave_vit.data.sets import DATASETS
from dave_vit.errors import DataError, escape_unprintable

TABLE, MASKS = "boxes.csv", "masks"
_COLUMNS = ("image", "left", "top", "right", "bottom")


@DATASETS.register("folder")
class Folder(FileDataset):
    """Images in one folder per class, or without classes in the folder itself.

    ``boxes.csv`` has the columns image, left, top, right, bottom, one line per box, images by their path in the
    folder. ``masks/`` holds pictures at the same paths, ending with .png, that are not black on the object.

    Args:
        root: the folder.
        limit: use at most this many images, sorted by path.
    """

    def __init__(self, root: str | Path, limit: int | None = None) -> None:
        super().__init__(root)
        folders = sorted(path for path in self.root.iterdir() if path.is_dir() and not path.name.startswith("."))
        names = [path.name for path in folders if path.name != MASKS and image_files(path)]
        self.class_names = [escape_unprintable(name) for name in names]
        label = {name: index for index, name in enumerate(names)}
        paths = [path for name in names for path in image_files(self.root / name)]
        paths = paths or image_files(self.root)
        if not paths:
            raise DataError(f"{self.root}: no images; looked in the folder and in one folder per class")
        boxes = read_boxes(self.root / TABLE)
        self.items = [self._item(path, label.get(path.parent.name), boxes) for path in paths[:limit]]
        unknown = sorted(boxes.keys() - {str(path.relative_to(self.root).as_posix()) for path in paths})
        if unknown:
            raise DataError(f"{TABLE}: no image {unknown[0]!r} in {self.root}; give paths as they are in the folder")

    def _item(self, path: Path, label: int | None, boxes: dict[str, tuple[Box, ...]]) -> Item:
        name = path.relative_to(self.root).as_posix()
        mask = (Path(MASKS) / name).with_suffix(".png")
        file = mask.as_posix() if (self.root / mask).is_file() else ""
        return Item(name, label if self.class_names else None, boxes.get(name, ()), name, file)


def read_boxes(path: Path) -> dict[str, tuple[Box, ...]]:
    """Read boxes by image from a table with the columns image, left, top, right, bottom; empty without a table."""
    if not path.is_file():
        return {}
    boxes: list[tuple[str, Box]] = []
    lines = read_csv(path)
    columns = next(lines, (0, []))[1]
    if not set(_COLUMNS) <= set(columns):
        raise DataError(f"{path.name}: columns {columns}; expected {', '.join(_COLUMNS)}")
    for number, line in lines:
        row = dict(zip(columns, line, strict=False))
        try:
            boxes.append((row["image"], box(*(row[name] for name in _COLUMNS[1:]))))
        except (KeyError, ValueError):
            raise DataError(f"{path.name}, line {number}: expected four numbers, got {line}") from None
    return group_boxes(boxes)
