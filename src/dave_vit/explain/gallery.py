"""The gallery of a run of `dave explain`: all pictures with their maps on one page and on one contact sheet."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image

from dave_vit._internal.atomic_files import png_bytes
from dave_vit.viz.pages import render

if TYPE_CHECKING:
    from dave_vit.explain.classes import ClassExplanation
    from dave_vit.methods import Explanation

Order = Literal["confidence", "sureness", "name"]

ON_PAGE = 1000  # pictures of which thumbnails are kept
ON_SHEET = 200  # of these on the contact sheet
_SIDE = 240  # pixels of a thumbnail's longer side


@dataclass(frozen=True)
class Shown:
    """A picture of the gallery.

    Attributes:
        name: of its file.
        classes: that were explained, with their probabilities.
        confidence: the probability of the first of them.
        sureness: see `sureness_of`.
        brightest: the number in the brightest colour of its maps, which have a scale of their own.
        files: of the result, by name.
        notes: what a reader has to know.
        photo: thumbnail of the photograph, a JPEG; empty where too many came before it.
        map: the same with the map over it.
    """

    name: str
    classes: str
    confidence: float
    sureness: float | None
    brightest: float
    files: tuple[str, ...]
    notes: tuple[str, ...]
    photo: bytes
    map: bytes

    @property
    def words(self) -> str:
        """What was found, on one line."""
        sure = "" if self.sureness is None else f", sureness {self.sureness:.1f}"
        return f"{self.classes}{sure}, brightest {self.brightest:.2g}"

    @property
    def large(self) -> str:
        """The file of the map over the photograph."""
        return next((file for file in self.files if file.endswith(".dave.png")), self.files[0])

    def record(self) -> dict[str, Any]:
        """All but the pixels, ready for JSON."""
        return {name: value for name, value in vars(self).items() if name not in ("photo", "map")}


class Gallery:
    """Pictures as they come; of each only a thumbnail is kept.

    Args:
        order: of page and sheet; the most confident or surest first.
    """

    def __init__(self, order: Order = "confidence") -> None:
        self._order: Order = order
        self._shown: list[Shown] = []
        self._model = ""
        self._made: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._shown)

    def add(self, result: ClassExplanation, overlay: bytes, record: Mapping[str, Any]) -> None:
        """Takes up a picture.

        Args:
            result: its maps.
            overlay: the file that shows them over the photograph.
            record: of the result, as it was written.
        """
        from dave_vit.viz.rendering import scale_map  # and with it matplotlib, which no worker of a run needs

        kept = len(self._shown) < ON_PAGE
        self._model = result.explainer.model.spec
        self._made[result.made] = None
        self._shown.append(
            Shown(
                Path(record["source"]).name if record["source"] != "-" else "standard input",
                ", ".join(f"{target.name} {target.probability:.1%}" for target in result.targets),
                result.targets[0].probability,
                sureness_of(result.explanation),
                max(scale_map(panel.map).limit for panel in result.panels),
                tuple(Path(file).name for file in record["files"]),
                result.notes,
                _thumbnail(result.classified.picture.image) if kept else b"",
                _thumbnail(_opened(overlay)) if kept else b"",
            )
        )

    def record(self) -> dict[str, Any]:
        """All pictures in their order, ready for JSON."""
        return {**self._facts, "order": self._order, "pictures": [one.record() for one in self._sorted(self._shown)]}

    def files(self) -> dict[str, bytes]:
        """The page, and the contact sheet, by the ending of their names."""
        shown = self._sorted(self._shown[:ON_PAGE])
        return {"html": self._page(shown), "png": self._sheet(shown[:ON_SHEET])}

    @property
    def _facts(self) -> dict[str, str]:
        first = next(iter(self._made))
        alike = len(self._made) == 1  # not where each picture took the samples that it needs
        return {"model": self._model, "method": first if alike else f"{first.rpartition(', ')[0]}, samples as needed"}

    @property
    def _has_sureness(self) -> bool:
        return any(one.sureness is not None for one in self._shown)

    def _sorted(self, shown: list[Shown]) -> list[Shown]:
        if self._order == "name":
            return sorted(shown, key=lambda one: one.name)
        values = {id(one): getattr(one, self._order) for one in shown}
        return sorted(shown, key=lambda one: (values[id(one)] is None, -(values[id(one)] or 0.0)))

    def _page(self, shown: list[Shown]) -> bytes:
        count = len(self._shown)
        left = f"The first {len(shown)} of {count} pictures are shown; the JSON file beside this page lists all."
        content = {
            "title": "dave explain",
            "heading": "What the model saw",
            "facts": [("pictures", str(count)), *self._facts.items()],
            "notes": [left] if len(shown) < count else [],
            "order": self._order,
            "orders": ["confidence", *(["sureness"] if self._has_sureness else []), "name"],
            "shown": shown,
        }
        return render("gallery.html", **content).encode()

    def _sheet(self, shown: list[Shown]) -> bytes:
        from dave_vit.viz.montage import draw_contact_sheet

        count = len(self._shown)
        some = f"{len(shown)} of {count} pictures" if len(shown) < count else f"{count} pictures"
        title = f"{some} by {self._order}, each on its own colour scale; {', '.join(self._facts.values())}"
        pairs = [(_opened(one.photo), _opened(one.map)) for one in shown]
        return png_bytes(draw_contact_sheet(pairs, [(one.name, one.words) for one in shown], title))


def sureness_of(explanation: Explanation) -> float | None:
    """How sure a map is, in one number: half of what it shows lies on pixels of at least this sureness.

    None for methods that draw no samples.
    """
    sure = explanation.sureness
    if sure is None:
        return None
    values, order = sure.detach().double().cpu().flatten().sort(descending=True)
    weight = explanation.map.detach().double().cpu().flatten().clamp(min=0)[order].cumsum(0)
    if not weight[-1] > 0:
        return 0.0
    return float(values[int((weight >= weight[-1] / 2).nonzero()[0])])


def _thumbnail(image: Image.Image) -> bytes:
    small, buffer = image.convert("RGB"), io.BytesIO()
    small.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    small.save(buffer, "jpeg", quality=86)
    return buffer.getvalue()


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))
