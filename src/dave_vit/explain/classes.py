"""One image from its pixels to results: what the model takes it for, the maps, and the files that keep them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dave_vit._internal.atomic_files import json_bytes, npz_bytes, png_bytes
from dave_vit._internal.environment import device_name, versions
from dave_vit.data.geometry import Geometry
from dave_vit.data.images import LoadedImage
from dave_vit.data.labels import parse_targets
from dave_vit.engine.forward import logits_of
from dave_vit.engine.targets import Contrast
from dave_vit.errors import DataError, OutputError
from dave_vit.methods import DAVE, Explanation, Method, create_method
from dave_vit.methods.options import declared_options
from dave_vit.methods.settings import method_settings, to_json_value
from dave_vit.models import Adapter
from dave_vit.models.domain import is_out_of_domain

if TYPE_CHECKING:
    from dave_vit.viz import Drawing, Panel, Photo, Scales, View

_MUCH_SEEN = 0.6  # share of a photograph below which it is said that much was cut off


@dataclass(frozen=True)
class Prediction:
    """A class of an image, with what the model says of it."""

    index: int
    name: str
    probability: float
    logit: float


@dataclass(frozen=True)
class ClassifiedImage:
    """An image as the model takes it.

    Attributes:
        picture: the image itself.
        inputs: preprocessed [1, C, H, W]; [N, C, H, W] of N tiles.
        predictions: all classes, the likeliest first.
        is_out_of_domain: whether it is unlike the pictures that the model was made for, as far as that is known.
    """

    picture: LoadedImage
    inputs: Tensor
    predictions: tuple[Prediction, ...]
    is_out_of_domain: bool = False

    @property
    def top5(self) -> tuple[Prediction, ...]:
        """The five likeliest classes, or all of a model that has fewer."""
        return self.predictions[:5]

    def pick(self, target: str | None) -> list[Prediction]:
        """The classes that a target means; see `dave_vit.data.labels.pick_targets`."""
        by_index = {prediction.index: prediction for prediction in self.predictions}
        names = [by_index[index].name for index in range(len(by_index))]
        return [by_index[index] for index in parse_targets(target, list(by_index), names)]


def classify(model: Adapter, picture: LoadedImage, inputs: Tensor | None = None) -> ClassifiedImage:
    """Preprocesses an image, unless that was done, and says what the model takes it for; on average, of tiles."""
    if inputs is None:
        corners = _parts(model, picture)
        inputs = model.preprocess([picture.image.crop(box) for box in corners] if len(corners) > 1 else picture.image)
    logits = logits_of(model, inputs).detach().double().cpu()  # [parts, classes]
    if not (logits < torch.inf).all():  # -inf rules a class out; NaN is below nothing
        raise OutputError(f"{model.spec} gives logits that are not finite for {picture.name}; check its weights")
    probabilities, mean = logits.softmax(1).mean(0), logits.mean(0)
    order = (probabilities if len(logits) > 1 else mean).argsort(descending=True).tolist()
    names = model.class_names
    predictions = (Prediction(index, names[index], float(probabilities[index]), float(mean[index])) for index in order)
    return ClassifiedImage(picture, inputs, tuple(predictions), bool(is_out_of_domain(model, logits).all()))


def _parts(model: Adapter, picture: LoadedImage) -> list[tuple[int, int, int, int]]:
    """The parts of an image that the model looks at one by one."""
    size, cut = picture.image.size, model.preprocessing.parts
    return cut(size) if cut is not None else [(0, 0, *size)]


class Explainer:
    """A model and a method, ready for one image after another.

    Args:
        model: of `load_model`.
        method: name of the method.
        weights: the file they came from, to be kept in records.
        against: what classes are set against: "rivals", a class by name or index, or "none"; as the method has it by
            default.
        options: of the method.
    """

    def __init__(
        self,
        model: Adapter,
        method: str = "dave",
        *,
        weights: str | None = None,
        against: str | int | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.weights, self.against = weights, against
        self.name = method
        self.options = options
        self.method: Method = create_method(method, model, **options)

    def on(self, model: Adapter) -> Explainer:
        """The same method on another model."""
        return Explainer(model, self.name, weights=self.weights, against=self.against, **self.options)

    def refine(self, classified: ClassifiedImage, targets: Sequence[Prediction]) -> Iterator[ClassExplanation]:
        """The result after each chunk of samples; methods without samples give one."""
        indices = [target.index for target in targets]
        inputs, start = classified.inputs, time.perf_counter()
        classes = torch.tensor((indices if len(indices) == 1 else [indices]) * len(inputs))
        wanted = classes if self.against is None else Contrast(classes, self.against)
        stages = getattr(self.method, "refine", None)
        for explanation in stages(inputs, wanted) if stages else [self.method.explain(inputs, wanted)]:
            if inputs.is_cuda:
                torch.cuda.synchronize(inputs.device)
            if not explanation.attribution.isfinite().all():
                raise OutputError(f"the map of {self.name} is not finite; give options nearer to the defaults")
            yield ClassExplanation(self, classified, tuple(targets), explanation, time.perf_counter() - start)

    @property
    def max_samples(self) -> int:
        """How many samples the method draws at most; 1 for those that draw none."""
        return int(getattr(self.method, "limit", getattr(self.method, "samples", 1)))

    def explain(self, classified: ClassifiedImage, targets: Sequence[Prediction]) -> ClassExplanation:
        """The result after all samples."""
        *_, last = self.refine(classified, targets)
        return last


@dataclass(frozen=True)
class ClassExplanation:
    """The maps of one image.

    Attributes:
        explainer: what made it.
        classified: the image.
        targets: the classes explained.
        explanation: of a batch of one.
        seconds: that it took.
    """

    explainer: Explainer
    classified: ClassifiedImage
    targets: tuple[Prediction, ...]
    explanation: Explanation
    seconds: float

    @property
    def image(self) -> Tensor:
        """As the model saw it: colours in [0, 1], [3, H, W]."""
        return self.explainer.model.preprocessing.picture(self.classified.inputs)[0]

    @property
    def panels(self) -> list[Panel]:
        """Map, title, error and sureness of each target, as the model saw it; those of tiles after each other."""
        from dave_vit.viz import build_panels

        names = dict(enumerate(self.explainer.model.class_names))
        titles = {target.index: f"{target.name} ({target.probability:.1%})" for target in self.targets}
        return build_panels(self.explanation, names | titles, unit=self.unit)

    @cached_property
    def photo(self) -> Photo:
        """The photograph, and where in it the model looked; its input where that cannot be found out."""
        from dave_vit.viz import Photo, to_pillow
        from dave_vit.viz.rendering import as_image

        model, picture = self.explainer.model, self.classified.picture
        try:
            places = [
                Geometry.measure(model.preprocessing, (right - left, bottom - top)).within_photo(
                    picture.image.size, (left, top)
                )
                for left, top, right, bottom in _parts(model, picture)
            ]
        except DataError:
            shown = to_pillow(as_image(self.image))
            return Photo(shown, (Geometry.identity(shown.size),))
        return Photo(picture.image, tuple(places))

    @property
    def placed(self) -> list[Panel]:
        """The panels of each target for looking at, in the photograph's own proportions."""
        return self.photo.panels(self._groups)

    @property
    def _groups(self) -> list[list[Panel]]:
        """For each target the panels of all parts of the image."""
        each = len(self.targets)
        return [self.panels[number::each] for number in range(each)]

    @property
    def unit(self) -> str:
        """Of the maps, where they have one."""
        prescribed = self.explanation.postprocess is not None  # whose maps are scaled already
        return "logit" if self.explainer.method.info.unit == "logit" and not prescribed else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know: what was done to the image, what was cut off, and whether samples are too few."""
        seen = self.photo.seen
        cut = f"the model sees {seen:.0%} of the photograph, its middle; --fit pad or tiles shows it all"
        strange = f"unlike anything that {self.explainer.model.spec} was made for: its answer means little"
        doubts = [doubt for doubt in self.explanation.doubts if doubt][:1]
        said = [*([strange] if self.classified.is_out_of_domain else []), *([cut] if seen < _MUCH_SEEN else [])]
        return (*self.classified.picture.notes, *said, *doubts)

    @property
    def made(self) -> str:
        """The method as it was used, in words that tell one preset from another."""
        known = declared_options(self.explainer.name).get("preset")
        preset = self.explainer.options.get("preset", known and known.default)
        parts = [
            self.explainer.name,
            f"preset {preset}" if preset else "",
            "against rivals" if "rivals" in (self.explanation.against or ()) else "",
            f"{self.explanation.samples} samples" if self.explanation.standard_error is not None else "",
        ]
        return ", ".join(filter(None, parts))

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """The map over the whole photograph, with a frame around what the model saw."""
        from dave_vit.viz import overlay_on_photo

        return overlay_on_photo(self.photo, self._groups, view, scales)

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Photograph, maps and sureness side by side."""
        from dave_vit.viz import draw_side_by_side

        title = f"{self.classified.picture.name}: {self.made}, {self.explainer.model.spec}"
        notes = [f"Note: {note}." for note in self.notes]
        photo = self.photo.resized(2)
        shown = photo.frame_seen_area(photo.image)
        beneath = self.image if self.photo.plain else photo.image
        return draw_side_by_side(
            shown, self.placed, title=title, view=view, scales=scales, notes=notes, beneath=beneath
        )

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Raw numbers: attribution [C, H, W], map, mean of the samples and its error [H, W].

        [K, ...] of K targets, and [N, ...] or [N, K, ...] of N tiles.
        """
        made = self.explanation
        arrays = {"attribution": made.attribution, "map": made.map}
        if made.standard_error is not None and made.mean is not None:
            arrays |= {"mean": made.mean, "standard_error": made.standard_error}
        kept = {name: self._one(tensor).detach().float().cpu().numpy() for name, tensor in arrays.items()}
        return kept | {"target": np.array([target.index for target in self.targets])}

    def _one(self, tensor: Tensor) -> Tensor:
        """What belongs to the image, or to each of its tiles."""
        return tensor[0] if len(tensor) == 1 else tensor

    def record(self) -> dict[str, Any]:
        """All that is needed to make it again, ready for JSON."""
        inputs, picture = self.classified.inputs, self.classified.picture
        return {
            "image": {"name": picture.name, "size": list(picture.image.size), "notes": list(picture.notes)},
            "model": self.explainer.model.spec,
            "weights": self.explainer.weights,
            "prepare": _said(self.explainer.model),
            "targets": [asdict(target) for target in self.targets],
            "against": self.against,
            "top5": [asdict(prediction) for prediction in self.classified.top5],
            "method": self.explainer.name,
            "options": self.explainer.options,
            "settings": method_settings(self.explainer.method),
            "seed": getattr(self.explainer.method, "seed", None),
            "samples": self.explanation.samples,
            **self._found(),
            "shape": list(inputs.shape[1:]),
            "crop": self.photo.boxes[0] if len(self.photo.boxes) == 1 else self.photo.boxes,
            "seen": round(self.photo.seen, 3),
            "seconds": round(self.seconds, 3),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device_name(inputs.device),
            "versions": dict(versions()),
        }

    @property
    def against(self) -> str | dict[str, Any] | None:
        """What the classes were set against: "rivals", a class, or nothing."""
        against = (self.explanation.against or (None,))[0]
        if not isinstance(against, int):
            return against
        return {"index": against, "name": self.explainer.model.class_names[against]}

    def _found(self) -> dict[str, Any]:
        """What the method found out by itself: whether anything is significant, and which neighbourhood fits."""
        made, method = self.explanation, self.explainer.method
        found: dict[str, Any] = {"unit": self.unit or None, "notes": list(self.notes)}
        if made.chance is not None:
            found["chance"] = self._one(made.chance).tolist()
        if made.significant is not None:
            found["significant"] = self._one(made.significant).tolist()
        if made.neighborhood_level is not None and isinstance(method, DAVE):
            level = int(made.neighborhood_level[0])
            found |= {"neighborhood_level": level, "neighborhood": to_json_value(method.levels[level])}
        return found

    def files(self, figure: str = "png", *, view: View = "map", scales: Scales = "shared") -> dict[str, bytes]:
        """The contents of the files that keep it, by the ending of their names; the JSON first.

        Args:
            figure: format of the side-by-side figure: "png", "svg" or "pdf".
            view: what speaks for the target, or that with what speaks against it.
            scales: one colour scale for all targets, or one for each.
        """
        return {
            "json": json_bytes(self.record()),
            "npz": npz_bytes(self.arrays()),
            "overlay.png": png_bytes(self.overlay(view, scales)),
            f"panels.{figure}": self.figure(view, scales).to_bytes(figure),
        }


def _said(model: Adapter) -> dict[str, Any] | None:
    """What the user said of the preprocessing."""
    return None if model.prepare is None else {name: part for name, part in asdict(model.prepare).items() if part}
