"""Data sets in COCO format: one JSON file of images, categories and annotations."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dave_vit.data.base import Box, FileDataset, Item, box, group_boxes
from dave_vit.data.sets import DATASETS
from dave_vit.errors import DataError

_FILES = ("annotations/instances_val*.json", "annotations/*.json", "*.json")
_IMAGE_FOLDERS = (".", "images", "val2017", "val2014", "val", "data", "../images", "../val2017", "../val2014")


@DATASETS.register("coco")
class Coco(FileDataset):
    """One item per image and category in it, with the boxes of that category; crowds are left out.

    Args:
        root: the folder with annotations and images, or the JSON file itself.
        limit: use at most this many items, sorted by file name.
    """

    def __init__(self, root: str | Path, limit: int | None = None) -> None:
        is_file = Path(root).is_file()
        super().__init__(Path(root).parent if is_file else root)
        found = (path for pattern in _FILES for path in sorted(self.root.glob(pattern)))
        path = Path(root) if is_file else next(found, None)
        if path is None:
            raise DataError(f"{self.root}: no annotations; looked for {', '.join(_FILES)}")
        try:
            content = json.loads(path.read_bytes())
            names = {int(one["id"]): str(one["name"]) for one in content["categories"]}
            files = {one["id"]: str(one["file_name"]) for one in content["images"]}
            boxes = group_boxes(_boxes(content["annotations"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = "images, categories and annotations of the COCO form"
            raise DataError(f"{path}: expected a JSON file with {what} ({type(error).__name__}: {error})") from None
        order = sorted(names)
        self.class_names = [names[category] for category in order]
        known = [key for key in boxes if key[0] in files and key[1] in names]
        folder = _image_folder(self.root, [files[image] for image, _ in known])
        self.items = []
        for image, category in sorted(known, key=lambda key: (files[key[0]], key[1]))[:limit]:
            file, label = files[image], order.index(category)
            name, boxes_here = f"{file}#{names[category]}", boxes[image, category]
            self.items.append(Item(name, label, boxes_here, f"{folder}/{file}", picture=file))


def _boxes(annotations: list[dict[str, Any]]) -> Iterator[tuple[tuple[Any, int], Box]]:
    """Yield image and category with each box; COCO writes left, top, width, height."""
    for one in annotations:
        if not one.get("iscrowd"):
            left, top, width, height = (float(number) for number in one["bbox"])
            yield (one["image_id"], int(one["category_id"])), box(left, top, left + width, top + height)


def _image_folder(root: Path, files: list[str]) -> str:
    """Return the folder that holds the images."""
    if not files:
        raise DataError(f"{root}: the annotations name no image with a box")
    for file in files[:100]:
        for folder in _IMAGE_FOLDERS:
            if (root / folder / file).is_file():
                return folder
    raise DataError(f"{root}: no image {files[0]!r}; looked in {', '.join(_IMAGE_FOLDERS)}")
