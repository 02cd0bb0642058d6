"""One image from its pixels to results: what the model takes it for, the maps, and the files that keep them."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dave_vit.atomic import json_bytes, npz_bytes
from dave_vit.data.images import Picture
from dave_vit.data.labels import pick_targets
from dave_vit.environment import device_name, versions
from dave_vit.errors import OutputError
from dave_vit.methods import DAVE, Explanation, Method, create_method
from dave_vit.methods.options import options_of
from dave_vit.models import Adapter
from dave_vit.run.passes import logits_of
from dave_vit.targets import Contrast

if TYPE_CHECKING:
    from dave_vit.viz import Drawing, Panel, Scales, View


@dataclass(frozen=True)
class Prediction:
    """A class of an image, with what the model says of it."""

    index: int
    name: str
    probability: float
    logit: float


@dataclass(frozen=True)
class Classified:
    """An image as the model takes it.

    Attributes:
        picture: the image itself.
        inputs: preprocessed [1, C, H, W].
        predictions: all classes, the likeliest first.
    """

    picture: Picture
    inputs: Tensor
    predictions: tuple[Prediction, ...]

    @property
    def top5(self) -> tuple[Prediction, ...]:
        """The five likeliest classes, or all of a model that has fewer."""
        return self.predictions[:5]

    def pick(self, target: str | None) -> list[Prediction]:
        """The classes that a target means; see `dave_vit.data.labels.pick_targets`."""
        by_index = {prediction.index: prediction for prediction in self.predictions}
        names = [by_index[index].name for index in range(len(by_index))]
        return [by_index[index] for index in pick_targets(target, list(by_index), names)]


def classify(model: Adapter, picture: Picture, inputs: Tensor | None = None) -> Classified:
    """Preprocesses an image, unless that was done, and says what the model takes it for."""
    inputs = model.preprocess(picture.image) if inputs is None else inputs
    logits = logits_of(model, inputs)[0].detach().double().cpu()  # [classes]
    if not (logits < torch.inf).all():  # -inf rules a class out; NaN is below nothing
        raise OutputError(f"{model.spec} gives logits that are not finite for {picture.name}; check its weights")
    probabilities = logits.softmax(0).tolist()
    order = logits.argsort(descending=True).tolist()
    names = model.class_names
    predictions = (Prediction(index, names[index], probabilities[index], float(logits[index])) for index in order)
    return Classified(picture, inputs, tuple(predictions))


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

    def refine(self, classified: Classified, targets: Sequence[Prediction]) -> Iterator[Result]:
        """The result after each chunk of samples; methods without samples give one."""
        indices = [target.index for target in targets]
        classes = torch.tensor(indices if len(indices) == 1 else [indices])
        wanted = classes if self.against is None else Contrast(classes, self.against)
        inputs, start = classified.inputs, time.perf_counter()
        stages = getattr(self.method, "refine", None)
        for explanation in stages(inputs, wanted) if stages else [self.method.explain(inputs, wanted)]:
            if inputs.is_cuda:
                torch.cuda.synchronize(inputs.device)
            if not explanation.attribution.isfinite().all():
                raise OutputError(f"the map of {self.name} is not finite; give options nearer to the defaults")
            yield Result(self, classified, tuple(targets), explanation, time.perf_counter() - start)

    @property
    def most_samples(self) -> int:
        """How many samples the method draws at most; 1 for those that draw none."""
        return int(getattr(self.method, "limit", getattr(self.method, "samples", 1)))

    def explain(self, classified: Classified, targets: Sequence[Prediction]) -> Result:
        """The result after all samples."""
        *_, last = self.refine(classified, targets)
        return last


@dataclass(frozen=True)
class Result:
    """The maps of one image.

    Attributes:
        explainer: what made it.
        classified: the image.
        targets: the classes explained.
        explanation: of a batch of one.
        seconds: that it took.
    """

    explainer: Explainer
    classified: Classified
    targets: tuple[Prediction, ...]
    explanation: Explanation
    seconds: float

    @property
    def image(self) -> Tensor:
        """As the model saw it: colours in [0, 1], [3, H, W]."""
        return self.explainer.model.preprocessing.picture(self.classified.inputs)[0]

    @property
    def panels(self) -> list[Panel]:
        """Map, title, standard error and sureness of each target."""
        from dave_vit.viz import panels_of

        names = dict(enumerate(self.explainer.model.class_names))
        titles = {target.index: f"{target.name} ({target.probability:.1%})" for target in self.targets}
        return panels_of(self.explanation, names | titles, unit=self.unit)

    @property
    def unit(self) -> str:
        """Of the maps, where they have one."""
        prescribed = self.explanation.postprocess is not None  # whose maps are scaled already
        return "logit" if self.explainer.method.info.unit == "logit" and not prescribed else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know: what was done to the image, and whether the map rests on too few samples."""
        doubt = self.explanation.doubts[0]
        return (*self.classified.picture.notes, *([doubt] if doubt else []))

    @property
    def made(self) -> str:
        """The method as it was used, in words that tell one preset from another."""
        known = options_of(self.explainer.name).get("preset")
        preset = self.explainer.options.get("preset", known and known.default)
        parts = [
            self.explainer.name,
            f"preset {preset}" if preset else "",
            "against rivals" if self.explanation.against == "rivals" else "",
            f"{self.explanation.samples} samples" if self.explanation.standard_error is not None else "",
        ]
        return ", ".join(filter(None, parts))

    def overlay(self, view: View = "map", scales: Scales = "shared") -> Image.Image:
        """The map over the image; several targets in several hues, and where they are signed beside each other."""
        from dave_vit.viz import blend, enlarged, overlay, scale, soften

        panels, signed = self.panels, view == "signed"
        if len(panels) > 1 and not signed:
            return enlarged(blend(self.image, [panel.map for panel in panels], shared=scales == "shared"))
        softened = [soften(panel.values(view), signed=signed) for panel in panels]
        like = softened if scales == "shared" else None
        drawn = [overlay(self.image, scale(values, signed=signed, like=like)) for values in softened]
        return enlarged(np.concatenate(drawn, 1))

    def figure(self, view: View = "map", scales: Scales = "shared") -> Drawing:
        """Image, maps and sureness side by side."""
        from dave_vit.viz import side_by_side

        title = f"{self.classified.picture.name}: {self.made}, {self.explainer.model.spec}"
        notes = [f"Note: {note}." for note in self.notes]
        return side_by_side(self.image, self.panels, title=title, view=view, scales=scales, notes=notes)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Raw numbers: attribution [C, H, W], map, mean of the samples and its error [H, W]; [K, ...] of K targets."""
        maps = torch.stack([torch.as_tensor(panel.map) for panel in self.panels])
        arrays = {"attribution": self.explanation.attribution[0], "map": maps[0] if len(maps) == 1 else maps}
        if self.explanation.standard_error is not None and self.explanation.mean is not None:
            arrays |= {"mean": self.explanation.mean[0], "standard_error": self.explanation.standard_error[0]}
        kept = {name: tensor.detach().float().cpu().numpy() for name, tensor in arrays.items()}
        return kept | {"target": np.array([target.index for target in self.targets])}

    def record(self) -> dict[str, Any]:
        """All that is needed to make it again, ready for JSON."""
        inputs, picture = self.classified.inputs, self.classified.picture
        return {
            "image": {"name": picture.name, "size": list(picture.image.size), "notes": list(picture.notes)},
            "model": self.explainer.model.spec,
            "weights": self.explainer.weights,
            "targets": [asdict(target) for target in self.targets],
            "against": self.against,
            "top5": [asdict(prediction) for prediction in self.classified.top5],
            "method": self.explainer.name,
            "options": self.explainer.options,
            "settings": settings(self.explainer.method),
            "seed": getattr(self.explainer.method, "seed", None),
            "samples": self.explanation.samples,
            **self._found(),
            "shape": list(inputs.shape[1:]),
            "seconds": round(self.seconds, 3),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device_name(inputs.device),
            "versions": dict(versions()),
        }

    @property
    def against(self) -> str | dict[str, Any] | None:
        """What the classes were set against: "rivals", a class, or nothing."""
        found = self.explanation.against
        if not isinstance(found, Tensor):
            return found
        index = int(found[0])
        return {"index": index, "name": self.explainer.model.class_names[index]}

    def _found(self) -> dict[str, Any]:
        """What the method found out by itself: whether anything is significant, and which neighbourhood fits."""
        made, method = self.explanation, self.explainer.method
        found: dict[str, Any] = {"unit": self.unit or None, "notes": list(self.notes)}
        if made.chance is not None:
            found["chance"] = made.chance[0].tolist()
        if made.significant is not None:
            found["significant"] = made.significant[0].tolist()
        if made.rung is not None and isinstance(method, DAVE):
            rung = int(made.rung[0])
            found |= {"rung": rung, "neighborhood": _plain((method.neighborhood, *method.narrower)[rung])}
        return found

    def files(self, figure: str = "png", *, view: View = "map", scales: Scales = "shared") -> dict[str, bytes]:
        """The contents of the files that keep it, by the ending of their names; the JSON first.

        Args:
            figure: format of the side-by-side figure: "png", "svg" or "pdf".
            view: what speaks for the target, or that with what speaks against it.
            scales: one colour scale for all targets, or one for each.
        """
        picture = io.BytesIO()
        self.overlay(view, scales).save(picture, "png")
        return {
            "json": json_bytes(self.record()),
            "npz": npz_bytes(self.arrays()),
            "overlay.png": picture.getvalue(),
            f"panels.{figure}": self.figure(view, scales).data(figure),
        }


def settings(method: Method) -> dict[str, Any]:
    """The options of a method as they turned out, defaults included."""
    public = {name: _plain(value) for name, value in vars(method).items() if not name.startswith("_")}
    return {name: value for name, value in public.items() if value is not None}


def _plain(value: Any) -> Any:
    """What JSON can hold; None for anything else, such as the model."""
    if isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: _plain(part) for name, part in vars(value).items()}
        return {"type": type(value).__name__, **{name: part for name, part in fields.items() if part is not None}}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return None
