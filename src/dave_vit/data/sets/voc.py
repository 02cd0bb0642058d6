"""Data sets in PASCAL VOC format: one XML file per image."""

from pathlib import Path

from dave_vit.data.base import Box, FileDataset, Item, find_first, group_boxes, image_files, read_objects, read_text
from dave_vit.data.sets import DATASETS
from dave_vit.errors import DataError

_LISTS = ("ImageSets/Main/val.txt", "ImageSets/Main/test.txt")
_CLASSES = """aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person
    pottedplant sheep sofa train tvmonitor""".split()


@DATASETS.register("voc")
class Voc(FileDataset):
    """One item per image and class in it, with the boxes of that class.

    Images of ``ImageSets/Main/val.txt`` (or ``test.txt``) are taken, or all where there is no such list. Classes are
    those of the challenge, or those that the annotations name, in the order of the alphabet.

    Args:
        root: the folder with ``JPEGImages`` and ``Annotations``.
        limit: use at most this many items, sorted by file name.
    """

    def __init__(self, root: str | Path, limit: int | None = None) -> None:
        super().__init__(root)
        images, notes = self.root / "JPEGImages", self.root / "Annotations"
        if not images.is_dir() or not notes.is_dir():
            raise DataError(f"{self.root}: looked for the folders JPEGImages and Annotations; one of them is missing")
        path = find_first(self.root, _LISTS)
        listed = {line.split()[0] for line in read_text(path).splitlines() if line.strip()} if path else None
        things: list[tuple[Path, str, tuple[Box, ...]]] = []
        for image in image_files(images):
            note = notes / f"{image.stem}.xml"
            if note.is_file() and (listed is None or image.stem in listed):
                things += [(image, name, boxes) for name, boxes in sorted(group_boxes(read_objects(note)).items())]
        if not things:
            raise DataError(f"{self.root}: no image in JPEGImages has objects in an XML file of Annotations")
        named = {name for _, name, _ in things}
        self.class_names = list(_CLASSES) if named <= set(_CLASSES) else sorted(named)
        label = {name: index for index, name in enumerate(self.class_names)}
        self.items = [
            Item(f"{path.name}#{name}", label[name], boxes, f"JPEGImages/{path.name}", picture=path.name)
            for path, name, boxes in things[:limit]
        ]
