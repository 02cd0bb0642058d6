"""Files of results: names that overwrite nothing of anybody else, and the gallery that shows all of one command."""

import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image

from dave_vit._internal.atomic_files import check_folder, image_bytes, json_bytes, write_files
from dave_vit.data.images import LoadedImage
from dave_vit.errors import escape_unprintable
from dave_vit.explanations.base import ImageExplanation
from dave_vit.methods import Explanation
from dave_vit.viz.pages import render
from dave_vit.viz.pictures import draw_contact_sheet, shrink
from dave_vit.viz.rendering import scale_map

_MOST_BYTES = 120  # of a name; file systems take 255 with the endings
_SHORT_ENDINGS = {"overlay.png": "png"}  # the one picture that most people want has the shortest name


class OutputFolder:
    """The folder of one command's results: NAME.dave.png, NAME.dave.json and so on.

    NAME is the picture's name, with labels for what was explained where that is not the default (`cat.tabby`). A result
    replaces an earlier one only where the same question was answered for the same pixels. Where another file has its
    name, be it a source, another result or anything that no record names, the picture's name gets a number (`cat-2`).

    Args:
        folder: the folder; created if absent.
        sources: all files that the command reads, or `-`.

    Raises:
        OptionError: nothing can be written there; known before anything is computed.
    """

    def __init__(self, folder: Path, sources: Sequence[str]) -> None:
        check_folder(folder)
        self._folder = folder
        self._sources = {Path(source).resolve() for source in sources if source != "-"}
        self._written: set[str] = set()

    def write(
        self,
        picture: LoadedImage | None,
        question: Mapping[str, Any],
        files: Mapping[str, bytes],
        record: Mapping[str, Any],
        labels: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Write the files of a result together, and return its record with their names.

        Args:
            picture: the picture that was explained; None for the gallery of several.
            question: all that decides the result, as plain data.
            files: contents by the ending of their names.
            record: record of the result; it becomes NAME.dave.json.
            labels: parts of the name that tell results of one picture apart; empty ones are left out.
        """
        stem, pixels = ("gallery", b"") if picture is None else (picture.name, picture.image.tobytes())
        contents = {_SHORT_ENDINGS.get(ending, ending): data for ending, data in files.items() if ending != "json"}
        text = json.dumps(question, sort_keys=True, default=str).encode()
        fingerprint = hashlib.sha256(text + pixels).hexdigest()[:16]
        name = self._choose_name(stem, labels, ["json", *contents], fingerprint)
        self._written.add(name)
        paths = {ending: self._folder / f"{name}.{ending}" for ending in ("json", *contents)}
        whole = {"files": [escape_unprintable(str(path)) for path in paths.values()], "question": fingerprint, **record}
        write_files({paths["json"]: json_bytes(whole), **{paths[one]: data for one, data in contents.items()}})
        return whole

    def _choose_name(self, stem: str, labels: Sequence[str], endings: Sequence[str], question: str) -> str:
        start = stem.encode()[:_MOST_BYTES].decode(errors="ignore")
        rest = [*filter(None, map(_clean_label, labels)), "dave"]
        numbered = itertools.chain([start], (f"{start}-{number}" for number in itertools.count(2)))
        names = (".".join([one, *rest]) for one in numbered)
        return next(one for one in names if one not in self._written and self._is_free(one, endings, question))

    def _is_free(self, name: str, endings: Sequence[str], question: str) -> bool:
        replaceable = _files_of_record(self._folder / f"{name}.json", question)
        return all(
            path.resolve() not in self._sources
            and (path.name in replaceable or not os.path.lexists(path))  # a link to nothing is somebody's as well
            for path in (self._folder / f"{name}.{ending}" for ending in endings)
        )


def _files_of_record(record: Path, question: str) -> set[str]:
    """Return the files of an earlier answer to the same question; none where the file is no record of one."""
    try:
        content = json.loads(record.read_bytes())
        return {Path(str(file)).name for file in content["files"]} if content["question"] == question else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _clean_label(text: str) -> str:
    label = re.sub(r"[^\w-]+", "-", escape_unprintable(text)).strip("-")
    return label.encode()[: _MOST_BYTES // 2].decode(errors="ignore")


Order = Literal["confidence", "certainty", "name"]

ON_PAGE = 1000  # pictures of which thumbnails are kept
ON_SHEET = 200  # of these on the contact sheet
_SIDE = 240  # pixels of a thumbnail's longer side


@dataclass(frozen=True)
class GalleryItem:
    """One result of the gallery.

    Attributes:
        name: name of the picture's file.
        classes: what was explained, with its probability where it has one.
        confidence: the probability of what was explained; None where it has none.
        certainty: see `median_certainty`.
        brightest: the number that the brightest colour of its maps stands for.
        files: names of the result's files.
        notes: what a reader has to know.
        photo: thumbnail of the photograph, a JPEG; empty where too many came before it.
        map: thumbnail of the map over the photograph, a JPEG.
    """

    name: str
    classes: str
    confidence: float | None
    certainty: float | None
    brightest: float
    files: tuple[str, ...]
    notes: tuple[str, ...]
    photo: bytes
    map: bytes

    @property
    def caption(self) -> str:
        """What was explained and the numbers of the map, on one line."""
        sure = "" if self.certainty is None else f", certainty {self.certainty:.1f}"
        return f"{self.classes}{sure}, brightest {self.brightest:.2g}"

    @property
    def large(self) -> str:
        """The file of the map over the photograph, or another picture of the result."""
        pictures = [file for file in self.files if file.endswith((".png", ".gif"))]
        return next((file for file in pictures if file.endswith(".dave.png")), [*pictures, *self.files][0])

    def record(self) -> dict[str, Any]:
        """Return all but the pixels, ready for JSON."""
        return {name: value for name, value in vars(self).items() if name not in ("photo", "map")}


class Gallery:
    """All results of one command on a page and on a contact sheet; only thumbnails are kept in memory.

    Args:
        order: how both are sorted; the most confident or the most certain first.
    """

    def __init__(self, order: Order = "confidence") -> None:
        self._order: Order = order
        self._items: list[GalleryItem] = []
        self._model = ""
        self._methods: dict[str, None] = {}

    def add(self, explanation: ImageExplanation, overlay: bytes, record: Mapping[str, Any]) -> None:
        """Add a result.

        Args:
            explanation: the result.
            overlay: the map over the photograph, a PNG file.
            record: the record of the result, as it was written.
        """
        keeps_pixels = len(self._items) < ON_PAGE
        self._model = explanation.explainer.model.spec
        self._methods[explanation.method_label] = None
        self._items.append(
            GalleryItem(
                Path(record["source"]).name if record["source"] != "-" else "standard input",
                explanation.caption,
                explanation.confidence,
                median_certainty(explanation.explanation),
                max(scale_map(panel.map).limit for panel in explanation.panels),
                tuple(Path(file).name for file in record["files"]),
                explanation.notes,
                _thumbnail(explanation.picture.image) if keeps_pixels else b"",
                _thumbnail(_open_image(overlay)) if keeps_pixels else b"",
            )
        )

    def record(self) -> dict[str, Any]:
        """Return all results in their order, ready for JSON."""
        return {**self._facts, "order": self._order, "pictures": [one.record() for one in self._sort(self._items)]}

    def files(self) -> dict[str, bytes]:
        """Return the page and the contact sheet, by the ending of their names."""
        items = self._sort(self._items[:ON_PAGE])
        return {"html": self._draw_page(items), "png": self._draw_sheet(items[:ON_SHEET])}

    @property
    def _facts(self) -> dict[str, str]:
        first = next(iter(self._methods))
        is_same = len(self._methods) == 1  # not where each picture took the samples that it needs
        return {"model": self._model, "method": first if is_same else f"{first.rpartition(', ')[0]}, samples as needed"}

    def _sort(self, items: list[GalleryItem]) -> list[GalleryItem]:
        """Sort by name, or by a number: the largest first, and results without one last."""
        if self._order == "name":
            return sorted(items, key=lambda one: one.name)
        return sorted(items, key=lambda one: (getattr(one, self._order) is None, -(getattr(one, self._order) or 0.0)))

    def _draw_page(self, items: list[GalleryItem]) -> bytes:
        count = len(self._items)
        missing = f"The first {len(items)} of {count} pictures are shown; the JSON file beside this page lists all."
        content = {
            "title": "dave explain",
            "heading": "What the model saw",
            "facts": [("pictures", str(count)), *self._facts.items()],
            "notes": [missing] if len(items) < count else [],
            "order": self._order,
            # numbers that no result has are left out
            "orders": [name for name in get_args(Order) if any(getattr(one, name) is not None for one in self._items)],
            "items": items,
        }
        return render("gallery.html", **content).encode()

    def _draw_sheet(self, items: list[GalleryItem]) -> bytes:
        count = len(self._items)
        shown = f"{len(items)} of {count} pictures" if len(items) < count else f"{count} pictures"
        title = f"{shown} by {self._order}, each on its own colour scale; {', '.join(self._facts.values())}"
        pairs = [(_open_image(one.photo), _open_image(one.map)) for one in items]
        return image_bytes(draw_contact_sheet(pairs, [(one.name, one.caption) for one in items], title))


def median_certainty(explanation: Explanation) -> float | None:
    """Return the certainty that half of a map's positive part reaches; None for methods that draw no samples."""
    certainty = explanation.certainty
    if certainty is None:
        return None
    values, order = certainty.detach().cpu().double().flatten().sort(descending=True)
    weight = explanation.map.detach().cpu().double().flatten().clamp(min=0)[order].cumsum(0)
    if not weight[-1] > 0:
        return 0.0
    return float(values[int((weight >= weight[-1] / 2).nonzero()[0])])


def _thumbnail(image: Image.Image) -> bytes:
    return image_bytes(shrink(image.convert("RGB"), _SIDE), "jpeg", quality=86)


def _open_image(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))
