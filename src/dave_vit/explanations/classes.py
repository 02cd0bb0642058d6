"""Explain classes of a photograph: what the model takes it for, and the maps of one class or several."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dave_vit.data.classes import parse_targets
from dave_vit.data.images import LoadedImage
from dave_vit.engine.forward import compute_logits
from dave_vit.errors import OutputError
from dave_vit.explanations.base import Arrays, ImageExplanation, drop_single_tile, tile_boxes
from dave_vit.explanations.explainer import Explainer
from dave_vit.models import Adapter
from dave_vit.models.adapter import is_out_of_domain
from dave_vit.viz.panels import build_panels
from dave_vit.viz.rendering import Panel


@dataclass(frozen=True)
class Prediction:
    """A class with the probability and the logit that the model gives it."""

    index: int
    name: str
    probability: float
    logit: float


@dataclass(frozen=True)
class ClassifiedImage:
    """A photograph with the model's predictions.

    Attributes:
        picture: the photograph.
        inputs: preprocessed [1, C, H, W]; [N, C, H, W] for N tiles.
        predictions: all classes, the likeliest first.
        is_out_of_domain: whether it is unlike the pictures that the model was trained for, as far as that is known.
    """

    picture: LoadedImage
    inputs: Tensor
    predictions: tuple[Prediction, ...]
    is_out_of_domain: bool = False

    @property
    def top5(self) -> tuple[Prediction, ...]:
        """The five likeliest classes, or all of a model with fewer."""
        return self.predictions[:5]

    def pick(self, target: str | None) -> list[Prediction]:
        """Return the classes that a target means; see `dave_vit.data.classes.parse_targets`."""
        by_index = {prediction.index: prediction for prediction in self.predictions}
        names = [by_index[index].name for index in range(len(by_index))]
        return [by_index[index] for index in parse_targets(target, list(by_index), names)]


def classify(model: Adapter, picture: LoadedImage, inputs: Tensor | None = None) -> ClassifiedImage:
    """Classify a photograph; the probabilities of tiles are averaged.

    Args:
        model: a classifier.
        picture: the photograph.
        inputs: the preprocessed photograph, where that is done already.
    """
    if inputs is None:
        boxes = tile_boxes(model, picture)
        inputs = model.preprocess([picture.image.crop(box) for box in boxes] if len(boxes) > 1 else picture.image)
    logits = compute_logits(model, inputs).detach().cpu().double()  # [tiles, classes]
    if not (logits < torch.inf).all():  # -inf rules a class out; NaN is below nothing
        raise OutputError(f"{model.spec} gives logits that are not finite for {picture.name}; check its weights")
    probabilities, mean = logits.softmax(1).mean(0), logits.mean(0)
    order = (probabilities if len(logits) > 1 else mean).argsort(descending=True).tolist()
    names = model.class_names
    predictions = (Prediction(index, names[index], float(probabilities[index]), float(mean[index])) for index in order)
    return ClassifiedImage(picture, inputs, tuple(predictions), bool(is_out_of_domain(model, logits).all()))


@dataclass(frozen=True)
class ClassExplanation(ImageExplanation):
    """The maps of one class or several.

    Attributes:
        classified: the photograph with the model's predictions.
        targets: the explained classes.
    """

    classified: ClassifiedImage
    targets: tuple[Prediction, ...]

    @property
    def caption(self) -> str:
        """The classes with their probabilities."""
        return ", ".join(f"{target.name} {target.probability:.1%}" for target in self.targets)

    @property
    def confidence(self) -> float | None:
        """The probability of the first class."""
        return self.targets[0].probability

    @property
    def summary(self) -> list[str]:
        """The five likeliest classes and the explained ones, one line each."""
        shown, other = dict.fromkeys((*self.classified.top5, *self.targets)), self.against
        against = f", against {other['name'] if isinstance(other, dict) else other}" if other else ""
        marks = dict.fromkeys(self.targets, f"  <- explained{against}")
        return [f"  {one.probability:6.1%}  {one.name} ({one.index}){marks.get(one, '')}" for one in shown]

    @property
    def panels(self) -> list[Panel]:
        """Map, title, error and certainty of each class; all classes of a tile, then the next tile."""
        names = dict(enumerate(self.explainer.model.class_names))
        titles = {target.index: f"{target.name} ({target.probability:.1%})" for target in self.targets}
        return build_panels(self.explanation, names | titles, unit=self.unit)

    @property
    def notes(self) -> tuple[str, ...]:
        """As of other kinds, and whether the model was made for such pictures."""
        changes, others = self.picture.notes, super().notes[len(self.picture.notes) :]
        strange = f"unlike the images that {self.explainer.model.spec} was trained on; its prediction is unreliable"
        return (*changes, *([strange] if self.classified.is_out_of_domain else []), *others)

    @property
    def against(self) -> str | dict[str, Any] | None:
        """What the classes were contrasted with: "rivals", a class, or nothing."""
        against = (self.explanation.against or (None,))[0]
        if not isinstance(against, int):
            return against
        return {"index": against, "name": self.explainer.model.class_names[against]}

    def details(self) -> dict[str, Any]:
        """The explained classes, their contrast, and the five likeliest classes."""
        targets, top5 = (list(map(asdict, group)) for group in (self.targets, self.classified.top5))
        return {"targets": targets, "against": self.against, "top5": top5}

    def arrays(self) -> Arrays:
        """Attribution [C, H, W], map [H, W], and the mean of the samples with its standard error [H, W].

        [K, ...] for K classes, and [N, ...] or [N, K, ...] for N tiles.
        """
        explanation = self.explanation
        tensors = {"attribution": explanation.attribution, "map": explanation.map}
        if explanation.standard_error is not None and explanation.mean is not None:
            tensors |= {"mean": explanation.mean, "standard_error": explanation.standard_error}
        arrays = {name: drop_single_tile(tensor).float().numpy(force=True) for name, tensor in tensors.items()}
        return arrays | {"target": np.array([target.index for target in self.targets])}


def refine_classes(
    explainer: Explainer,
    classified: ClassifiedImage,
    targets: Sequence[Prediction],
    kind: type[ClassExplanation] = ClassExplanation,
    **fields: Any,
) -> Iterator[ClassExplanation]:
    """Yield the explanation after each chunk of samples; methods that draw no samples yield one.

    Args:
        explainer: the model and the method.
        classified: what is explained.
        targets: its classes.
        kind: the class of the explanations.
        fields: the fields that this class adds.
    """
    indices, inputs = [target.index for target in targets], classified.inputs
    target = torch.tensor((indices if len(indices) == 1 else [indices]) * len(inputs))
    for explanation, seconds in explainer.refine(inputs, target):
        shared = (explainer, classified.picture, inputs, explanation, seconds, classified, tuple(targets))
        yield kind(*shared, **fields)


def explain_classes(
    explainer: Explainer, classified: ClassifiedImage, targets: Sequence[Prediction]
) -> ClassExplanation:
    """Return the explanation after all samples."""
    *_, last = refine_classes(explainer, classified, targets)
    return last
