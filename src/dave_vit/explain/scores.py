"""Any score of one photograph, from pixels to files: what `results` is for classes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from dave_vit._internal.atomic_files import json_bytes, npz_bytes, png_bytes
from dave_vit._internal.environment import device_name, versions
from dave_vit.data.geometry import Geometry
from dave_vit.data.images import LoadedImage
from dave_vit.engine.forward import logits_of
from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError
from dave_vit.explain.classes import Explainer
from dave_vit.methods import Explanation
from dave_vit.methods.settings import method_settings
from dave_vit.models.named_scores import parse_score


@dataclass(frozen=True)
class DetectedBox:
    """An object that a detector found.

    Attributes:
        label: index of its class.
        name: of its class.
        probability: of this class.
        corners: (x0, y0, x1, y1) in pixels of the photograph.
    """

    label: int
    name: str
    probability: float
    corners: tuple[float, float, float, float]

    @property
    def score(self) -> str:
        """Its score by name."""
        return f"box:{','.join(f'{corner:.1f}' for corner in self.corners)}:{self.label}"


@dataclass(frozen=True)
class ScoreExplanation:
    """The map of one score of one photograph.

    Attributes:
        explainer: what made it.
        picture: the photograph.
        score: by name.
        value: of the score.
        explanation: of a batch of one.
        geometry: how the input lies in the photograph.
        seconds: that it took.
    """

    explainer: Explainer
    picture: LoadedImage
    score: str
    value: float
    explanation: Explanation
    geometry: Geometry
    seconds: float

    @property
    def name(self) -> str:
        """What was explained."""
        return self.score

    @property
    def map(self) -> Tensor:
        """In the frame of the photograph, ``[H, W]``."""
        return self.geometry.to_photo(self.explanation.map[0].detach().float().cpu())

    def overlay(self) -> Image.Image:
        """The map over the photograph, with the box that the score looks at."""
        from dave_vit.viz import overlay, to_pillow

        shown = to_pillow(overlay(self.picture.image, self.map))
        corners = _corners_in(self.score)
        if corners is not None:
            ImageDraw.Draw(shown).rectangle(corners, outline="white", width=2)
        return shown

    def record(self) -> dict[str, Any]:
        """All that is needed to make it again, ready for JSON."""
        return {
            "image": {"name": self.picture.name, "size": list(self.picture.image.size)},
            "model": self.explainer.model.spec,
            "weights": self.explainer.weights,
            "score": self.score,
            "value": self.value,
            "method": self.explainer.name,
            "options": self.explainer.options,
            "settings": method_settings(self.explainer.method),
            "samples": self.explanation.samples,
            "seconds": round(self.seconds, 3),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device_name(self.explanation.attribution.device),
            "versions": dict(versions()),
        }

    def shared(self) -> dict[str, Any]:
        """The record without what is of this score alone: what several maps of a photograph have in common."""
        return {name: value for name, value in self.record().items() if name not in ("score", "value", "seconds")}

    def files(self) -> dict[str, bytes]:
        """The contents of the files that keep it, by the ending of their names."""
        attribution = self.explanation.attribution[0].detach().float().cpu().numpy()
        arrays = {"attribution": attribution, "map": self.map.numpy()}
        return {"json": json_bytes(self.record()), "npz": npz_bytes(arrays), "overlay.png": png_bytes(self.overlay())}


@dataclass(frozen=True)
class BoxesExplanation:
    """All objects that a detector found in a photograph, in one picture.

    Attributes:
        found: the objects.
        maps: of them.
    """

    found: tuple[DetectedBox, ...]
    maps: tuple[ScoreExplanation, ...]

    @property
    def name(self) -> str:
        """What was explained."""
        return "boxes"

    @property
    def picture(self) -> LoadedImage:
        """The photograph."""
        return self.maps[0].picture

    def overlay(self) -> Image.Image:
        """The maps over the photograph, a hue for each, with boxes and names in the same hues."""
        from dave_vit.viz import HUES, blend, load_font, to_pillow

        shown = to_pillow(blend(self.picture.image, [made.map for made in self.maps]))
        pen = ImageDraw.Draw(shown)
        for number, each in enumerate(self.found):
            colour, (left, top) = HUES[number % len(HUES)], each.corners[:2]
            pen.rectangle(each.corners, outline=colour, width=2)
            text, place = f"{each.name} {each.probability:.0%}", (left + 3, top + 2)
            pen.rectangle(pen.textbbox(place, text, font=load_font()), fill="white")
            pen.text(place, text, fill=colour, font=load_font())
        return shown

    def record(self) -> dict[str, Any]:
        """What was found, ready for JSON."""
        return {**self.maps[0].shared(), "boxes": [{**vars(each), "score": each.score} for each in self.found]}

    def files(self) -> dict[str, bytes]:
        """The contents of the files that keep it, by the ending of their names."""
        return {"json": json_bytes(self.record()), "overlay.png": png_bytes(self.overlay())}


def explain_score(explainer: Explainer, picture: LoadedImage, text: str) -> ScoreExplanation:
    """Explains a score by its name; see ``dave_vit.models.named_scores.FORMS``."""
    model, start = explainer.model, time.perf_counter()
    geometry = Geometry.measure(model.preprocessing, picture.image.size)
    score = parse_score(text, model, geometry)
    inputs = model.preprocess(picture.image)
    explanation = explainer.method.explain(inputs, score)
    value = float(logits_of(model, inputs, Target(score=score).read))
    return ScoreExplanation(explainer, picture, text, value, explanation, geometry, time.perf_counter() - start)


def boxes(explainer: Explainer, picture: LoadedImage, *, threshold: float = 0.5, most: int = 5) -> list[DetectedBox]:
    """The objects that a detector finds in a photograph, the surest first.

    Args:
        explainer: holds the detector.
        picture: the photograph.
        threshold: the least probability.
        most: the largest number of objects.
    """
    model = explainer.model
    with torch.no_grad():
        output: Any = model(model.preprocess(picture.image))
    if not isinstance(getattr(output, "pred_boxes", None), Tensor):
        raise OptionError(f"{model.spec} finds no boxes; --boxes is for detectors")
    geometry = Geometry.measure(model.preprocessing, picture.image.size)
    best, labels = _probabilities(output.logits[0], len(model.class_names)).max(-1)  # [queries]
    order = [index for index in best.argsort(descending=True).tolist() if best[index] >= threshold][:most]
    return [
        DetectedBox(
            int(labels[index]),
            model.class_names[int(labels[index])],
            float(best[index]),
            _in_photo(output.pred_boxes[0, index].tolist(), geometry),
        )
        for index in order
    ]


def explain_boxes(
    explainer: Explainer, picture: LoadedImage, threshold: float = 0.5
) -> Iterator[tuple[DetectedBox, ScoreExplanation]]:
    """One map for each object that a detector finds."""
    found = boxes(explainer, picture, threshold=threshold)
    if not found:
        raise OptionError(f"no box of {picture.name} is as likely as {threshold:g}; lower it with --threshold")
    for each in found:
        yield each, explain_score(explainer, picture, each.score)


def _probabilities(logits: Tensor, classes: int) -> Tensor:
    """``[queries, classes]``; DETR's last logit stands for no object, others judge each class by itself."""
    return logits.softmax(-1)[..., :-1] if logits.shape[-1] == classes + 1 else logits.sigmoid()


def _in_photo(box: list[float], geometry: Geometry) -> tuple[float, float, float, float]:
    """Centre and size as fractions of the input, as corners in the photograph, cut at its edges."""
    x, y, width, height = box
    return geometry.box_to_photo((x - width / 2, y - height / 2, x + width / 2, y + height / 2))


def _corners_in(score: str) -> list[float] | None:
    name, _, rest = score.partition(":")
    return [float(part) for part in rest.split(":")[0].split(",")] if name in ("box", "region") else None
