"""Explain images in one call: `dave_vit.explain`, and `dave_vit.pipeline` in the manner of transformers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.data.images import arrays_to_pictures
from dave_vit.engine.forward import compute_logits
from dave_vit.engine.targets import TargetLike
from dave_vit.errors import InputError, OptionError
from dave_vit.methods import Explanation, create_method
from dave_vit.methods.sampling import probabilities
from dave_vit.models import loading
from dave_vit.models.adapter import do_classes_compete
from dave_vit.models.loading import find_preprocessing

ImageLike = str | Path | Image.Image | np.ndarray[Any, Any] | Tensor
TASK = "image-attribution"
_MAX_CHANNELS = 4  # of an array whose last axis is colours


def explain(
    image: ImageLike | Sequence[ImageLike],
    model: str | nn.Module = "builtin",
    target: TargetLike = None,
    *,
    method: str = "dave",
    processor: Any = None,
    **options: Any,
) -> Explanation:
    """Explain an image, or several of one size, in one call; `pipeline` loads a model once for many calls.

    Args:
        image: a path, a PIL image, or an array or tensor of colours: bytes, or floats ``[H, W, 3]`` in 0 to 1. Floats
            with channels first, ``[C, H, W]`` or ``[B, C, H, W]``, are taken as preprocessed.
        model: a spec, as for `load_model`, or a module, such as a loaded transformers or timm model.
        target: as for every method; None for the predicted class.
        method: name of the method.
        processor: for a loaded model: its processor of transformers, or a function from a PIL image to a tensor.
        options: of the method, such as ``samples``.

    Example:
        >>> dave_vit.explain("photo.jpg", "timm:deit_tiny_patch16_224").save("map.png")
    """
    return AttributionPipeline(model, method=method, processor=processor, **options).explain(image, target)


def pipeline(task: str = TASK, model: str | nn.Module = "builtin", **options: Any) -> "AttributionPipeline":
    """Return a function from images to plain dictionaries with their maps.

    Args:
        task: "image-attribution".
        model: as for `explain`.
        options: ``method``, ``processor`` and options of the method, as for `explain`.

    Example:
        >>> attribute = dave_vit.pipeline("image-attribution", model="timm:deit_tiny_patch16_224")
        >>> attribute("photo.jpg")["heatmap"]
    """
    if task != TASK:
        raise OptionError(f"unknown task {task!r}; there is {TASK!r}")
    return AttributionPipeline(model, **options)


class AttributionPipeline:
    """A model, its preprocessing and a method: from images to dictionaries; see `pipeline`."""

    def __init__(self, model: str | nn.Module, *, method: str = "dave", processor: Any = None, **options: Any) -> None:
        self.model: nn.Module = loading.load_model(model) if isinstance(model, str) else model
        self.method = create_method(method, self.model, **options)
        self._own_preprocess = None if processor is not None else getattr(self.model, "preprocess", None)
        self._preprocessing = find_preprocessing(self.model, processor)

    def __call__(self, images: ImageLike | Sequence[ImageLike], target: TargetLike = None) -> Any:
        """Explain an image, or each image of a list by itself.

        Returns:
            A dictionary, or a list of them: ``label``, ``target`` and ``score`` (the class and its probability, None
            for score functions), ``heatmap`` (``[H, W]`` in 0 to 1), ``attribution`` (``[C, H, W]``),
            ``standard_error`` (``[H, W]``, or None) and ``warning`` (a sentence, or None); arrays are of numpy.
        """
        if not isinstance(images, list | tuple):
            return self._describe(images, target)
        targets = target if isinstance(target, list | tuple) else [target] * len(images)
        return [self._describe(image, each) for image, each in zip(images, targets, strict=True)]

    def explain(self, image: ImageLike | Sequence[ImageLike], target: TargetLike = None) -> Explanation:
        """Explain images of one size together."""
        images = image if isinstance(image, list | tuple) else [image]
        explanation = self.method.explain(torch.cat([self._prepare(one) for one in images]), target)
        subject, classes = explanation.subject, explanation.target
        if subject is not None and classes is not None and explanation.probability is None:
            logits = compute_logits(self.model, subject.inputs)
            compete = do_classes_compete(self.model, logits)
            chances = probabilities(logits.unsqueeze(0), classes.reshape(len(classes), -1), compete)[0]
            explanation = replace(explanation, probability=chances.reshape(classes.shape))
        if self._preprocessing is None or subject is None or subject.to_colours is not None:
            return explanation
        return replace(explanation, subject=replace(subject, to_colours=self._preprocessing.picture))

    def _prepare(self, image: Any) -> Tensor:
        """Return the model's input of an image, ``[B, C, H, W]``, in the model's precision and on its device."""
        if not isinstance(image, Tensor | np.ndarray):
            inputs = self._preprocess(image)
        elif _is_preprocessed(image):
            values = image if isinstance(image, Tensor) else torch.tensor(image)
            inputs = values if values.ndim > 3 else values.unsqueeze(0)
        else:
            pictures = arrays_to_pictures(image.numpy(force=True) if isinstance(image, Tensor) else image)
            inputs = torch.cat([self._preprocess(picture) for picture in pictures])
        parameter = next(self.model.parameters(), None)
        return inputs if parameter is None else inputs.to(parameter)

    def _preprocess(self, image: Any) -> Tensor:
        if not isinstance(image, str | Path | Image.Image):
            raise InputError(
                f"the image is of type {type(image).__name__}; give a path, a PIL image, an array or a tensor"
            )
        if self._own_preprocess is not None:
            return self._own_preprocess(image)  # type: ignore[no-any-return]
        if self._preprocessing is None:
            raise InputError(
                "the image is a picture, and how this model preprocesses pictures is not known; give processor=, its "
                "processor of transformers or a function from a PIL image to a tensor, or a preprocessed float tensor"
            )
        return self._preprocessing(image)

    def _describe(self, image: Any, target: TargetLike) -> dict[str, Any]:
        explanation = self.explain(image, target).select(torch.tensor([0]))
        subject, error = explanation.subject, explanation.standard_error
        known: dict[str, Any] = {"label": None, "target": None, "score": None}
        if explanation.target is not None and subject is not None:
            index = explanation.target[0]
            names, chance, numbers = subject.names, explanation.probability, index.flatten().tolist()
            labels = [names[number] if names else f"class {number}" for number in numbers]
            label, score = labels if index.ndim else labels[0], None if chance is None else chance[0].tolist()
            known = {"label": label, "target": index.tolist(), "score": score}
        return known | {
            "heatmap": explanation.heatmap[0].numpy(force=True),
            "attribution": explanation.attribution[0].numpy(force=True),
            "standard_error": None if error is None else error[0].numpy(force=True),
            "warning": explanation.warnings[0],
        }


def _is_preprocessed(image: Tensor | np.ndarray[Any, Any]) -> bool:
    """Return whether an array holds floats with channels first, as models take them."""
    is_float = image.is_floating_point() if isinstance(image, Tensor) else np.issubdtype(image.dtype, np.floating)
    return is_float and image.ndim > 2 and image.shape[-1] > _MAX_CHANNELS
