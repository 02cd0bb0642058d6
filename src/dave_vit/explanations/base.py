"""What explanations of all kinds share: the photograph, its maps, a record, a figure, an overlay and their files."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from torch import Tensor

from dave_vit._internal.atomic_files import image_bytes, json_bytes, npz_bytes
from dave_vit._internal.environment import device_name, versions
from dave_vit.data.geometry import Geometry, crop_middle
from dave_vit.data.images import LoadedImage
from dave_vit.errors import DataError
from dave_vit.explanations.explainer import Explainer
from dave_vit.methods import DAVE, Explanation
from dave_vit.methods.masking import MaskingMethod
from dave_vit.methods.options import declared_options, method_settings, to_json_value
from dave_vit.models import Adapter
from dave_vit.viz.figures import Drawing
from dave_vit.viz.panels import draw_side_by_side
from dave_vit.viz.pictures import overlay_on_photo
from dave_vit.viz.rendering import Panel, Photo, Scales, View, as_image, to_pillow

_LITTLE_SEEN = 0.6  # share of a photograph below which a note says how much was cut off
_ENLARGED = 0.5  # pixels of a photograph for each of the model's input below which a note says that it is small

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class ImageExplanation(ABC):
    """The maps of one picture or clip, computed by one method.

    Attributes:
        explainer: the model and the method.
        picture: the photograph; of a clip, its first frame.
        inputs: the preprocessed photograph [1, C, H, W]; [N, C, H, W] for N tiles, [1, T, C, H, W] for clips.
        explanation: what the method returned for these inputs; of several scores, that of the first one.
        seconds: how long the method took.
    """

    figure_name: ClassVar[str] = "panels"

    explainer: Explainer
    picture: LoadedImage
    inputs: Tensor
    explanation: Explanation
    seconds: float

    @property
    @abstractmethod
    def caption(self) -> str:
        """What was explained, on one line."""

    @property
    def summary(self) -> list[str]:
        """Lines that tell what was explained, for the terminal."""
        return [f"  {self.caption}"]

    @property
    @abstractmethod
    def panels(self) -> list[Panel]:
        """Map, title, error and certainty of each target, in the frame of the input; tile by tile."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """The part of the record that this kind of explanation adds."""

    def arrays(self) -> Arrays:
        """Attribution of the input, and map in the frame of the photograph: the raw numbers of the .npz file."""
        attribution = self.explanation.attribution[0].float().numpy(force=True)
        return {"attribution": attribution, "map": self.viewed_map().numpy()}

    @property
    def confidence(self) -> float | None:
        """The probability of what was explained; None where it has none."""
        return None

    @property
    def unit(self) -> str:
        """Unit of the maps; empty where they have none."""
        is_scaled = self.explanation.postprocess is not None
        return "logit" if self.explainer.method.info.unit == "logit" and not is_scaled else ""

    @property
    def image(self) -> Tensor:
        """The input as the model saw it: colours in [0, 1], [3, H, W]."""
        return self.explainer.model.preprocessing.picture(self.inputs)[0]

    @cached_property
    def photo(self) -> Photo:
        """The photograph with the area that the model saw; the input itself where that area cannot be computed."""
        try:
            return locate_inputs(self.explainer.model, self.picture)
        except DataError:
            shown = to_pillow(as_image(self.image))
            return Photo(shown, (Geometry.identity(shown.size),))

    @property
    def photo_panels(self) -> list[Panel]:
        """The panels of each target in the photograph's own proportions."""
        return self.photo.panels(self._groups)

    @property
    def _groups(self) -> list[list[Panel]]:
        """For each target, the panels of all tiles of the photograph."""
        panels = self.panels
        targets = len(panels) // len(self.photo.parts)
        return [panels[number::targets] for number in range(targets)]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know: changes to the photograph, areas that were cut off, too few samples."""
        photo, notes = self.photo, list(self.picture.notes)
        if photo.visible_share < _LITTLE_SEEN and len(photo.parts) == 1:
            how = "--fit pad or --fit tiles explains all of it"
            notes.append(f"the model's crop covers {photo.visible_share:.0%} of the photograph; {how}")
        if max(photo.parts[0].scale) < _ENLARGED:
            width, height = photo.image.size
            notes.append(f"the map is finer than the photograph, which has {width} x {height} pixels")
        return (*notes, *[warning for warning in self.explanation.warnings if warning][:1])

    @property
    def method_label(self) -> str:
        """The method with its preset, contrast and number of samples, for titles."""
        option = declared_options(self.explainer.name).get("preset")
        preset = self.explainer.options.get("preset", option and option.default)
        parts = [
            self.explainer.name,
            f"preset {preset}" if preset else "",
            "against rivals" if "rivals" in (self.explanation.against or ()) else "",
            *(f"{count} {name}" for name, count in self.counts.items()),
        ]
        return ", ".join(filter(None, parts))

    @property
    def counts(self) -> dict[str, int]:
        """How many samples, steps or masks the map took, by these names; empty for one pass."""
        method, explanation = self.explainer.method, self.explanation
        is_masking = isinstance(method, MaskingMethod)
        if explanation.standard_error is not None and not is_masking:
            return {"samples": explanation.samples}
        counts = {"steps": getattr(method, "steps", None)}
        counts |= {"masks" if is_masking else "samples": getattr(method, "samples", None)}
        return {name: count for name, count in counts.items() if isinstance(count, int)}

    def viewed_map(self, view: View = "map") -> Tensor:
        """Return the map of the first tile and target in the frame of the photograph, [H, W]; [T, H, W] of clips."""
        maps = self.explanation.signed if view == "signed" else self.explanation.map
        found, parts = maps[0].detach().float().cpu(), self.photo.parts
        if found.ndim == 2 or len(parts) == 1:
            return parts[0].to_photo(found)
        page = found.new_zeros(self.picture.image.size[::-1])  # of several photographs beside each other
        boxes = tile_boxes(self.explainer.model, self.picture)
        for one, part, (left, top, right, bottom) in zip(found, parts, boxes, strict=True):
            place = (slice(top, bottom), slice(left, right))
            page[place] = part.to_photo(crop_middle(one, part.input_size[::-1]))[place]
        return page

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """Draw the maps over the whole photograph, with a frame around the area that the model saw."""
        return overlay_on_photo(self.photo, self._groups, view, scales)

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Draw photograph, maps and certainty side by side."""
        photo = self.photo.resize(2)
        return draw_side_by_side(
            photo.frame_seen_area(photo.image),
            self.photo_panels,
            title=f"{self.picture.name}: {self.method_label}, {self.explainer.model.spec}",
            view=view,
            scales=scales,
            notes=[f"Note: {note}." for note in self.notes],
            beneath=self.image if self.photo.is_plain else photo.image,
            overlay=self.overlay(view, scales),
            align=photo.align,
        )

    def record(self) -> dict[str, Any]:
        """Return all that is needed to reproduce the result, ready for JSON."""
        model, method = self.explainer.model, self.explainer.method
        boxes = [[round(side, 1) for side in part.visible_box] for part in self.photo.parts]
        return {
            "image": {
                "name": self.picture.name,
                "size": list(self.picture.image.size),
                "notes": list(self.picture.notes),
            },
            "model": model.spec,
            "weights": self.explainer.weights,
            "prepare": model.prepare and {name: value for name, value in asdict(model.prepare).items() if value},
            **self.details(),
            "method": self.explainer.name,
            "options": self.explainer.options,
            "settings": method_settings(method),
            "seed": getattr(method, "seed", None),
            **self.counts,
            "unit": self.unit or None,
            "notes": list(self.notes),
            **self._certainty(),
            "shape": list(self.inputs.shape[1:]),
            "crop": boxes[0] if len(boxes) == 1 else boxes,
            "seen": round(self.photo.visible_share, 3),
            "seconds": round(self.seconds, 3),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device_name(self.inputs.device),
            "versions": dict(versions()),
        }

    def _certainty(self) -> dict[str, Any]:
        """Return what the method measured by itself: whether anything is significant, and which neighbourhood fits."""
        explanation, method = self.explanation, self.explainer.method
        values = {"noise_share": explanation.noise_share, "significant": explanation.significant}
        certainty: dict[str, Any] = {
            name: drop_single_tile(value).tolist() for name, value in values.items() if value is not None
        }
        if explanation.neighborhood_level is not None and isinstance(method, DAVE):
            level = int(explanation.neighborhood_level[0])
            certainty |= {"neighborhood_level": level, "neighborhood": to_json_value(method.levels[level])}
        return certainty

    def files(self, figure_format: str = "png", *, view: View = "map", scales: Scales = "shared") -> dict[str, bytes]:
        """Return the contents of the result's files by the ending of their names; the JSON first.

        Args:
            figure_format: format of the side-by-side figure: "png", "svg" or "pdf".
            view: "map" for what speaks for the target, "signed" with what speaks against it.
            scales: one colour scale for all targets, or one for each.
        """
        return {
            "json": json_bytes(self.record()),
            "npz": npz_bytes(self.arrays()),
            "overlay.png": image_bytes(self.overlay(view, scales)),
            f"{self.figure_name}.{figure_format}": self.figure(view, scales).to_bytes(figure_format),
        }


Labelled = tuple[str, Sequence[ImageExplanation]]
"""A label for the names of files, and the explanation after each chunk of samples; the last one is the result."""


def tile_boxes(model: Adapter, picture: LoadedImage) -> list[tuple[int, int, int, int]]:
    """Return the parts of a photograph that the model sees one by one; one part without --fit tiles."""
    size, split = picture.image.size, model.preprocessing.parts
    return split(size) if split is not None else [(0, 0, *size)]


def locate_inputs(model: Adapter, picture: LoadedImage) -> Photo:
    """Return a photograph with the areas that the model sees; DataError where these cannot be computed."""
    size, parts = picture.image.size, []
    for left, top, right, bottom in tile_boxes(model, picture):
        geometry = Geometry.measure(model.preprocessing, (right - left, bottom - top))
        parts.append(geometry.within_photo(size, (left, top)))
    return Photo(picture.image, tuple(parts))


def drop_single_tile(tensor: Tensor) -> Tensor:
    """Return the values of the image, or [N, ...] of its N tiles."""
    return tensor[0] if len(tensor) == 1 else tensor
