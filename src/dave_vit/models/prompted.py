"""Models that take a prompt besides the image: a text to detect, a point to segment, a question."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.data.geometry import Geometry
from dave_vit.data.images import to_rgb
from dave_vit.engine.scores import Region
from dave_vit.errors import InputError, OptionError
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.inputs import with_inputs
from dave_vit.models.tasks import TASKS, TaskKind, TaskModel
from dave_vit.models.traits import Traits

_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class PromptedModel(Adapter):
    """A model that takes a prompt; `with_prompt` turns it into a model of one image's pixels.

    Args:
        model: the model of transformers.
        processor: turns images and prompts into the model's inputs; None where the model takes no prompt.
        preprocess: turns an image into an input tensor.
        spec: the name under which the model was loaded.
        traits: facts about the model.
    """

    def __init__(
        self, model: Any, processor: Any, preprocess: Preprocessing, *, spec: str, traits: Traits | None = None
    ) -> None:
        super().__init__(model, preprocess, [], spec=spec, traits=traits)
        self.processor = processor

    def forward(self, inputs: Tensor) -> Tensor:
        """Raise InputError: the output depends on the prompt."""
        raise InputError(f"{self.spec} takes a prompt; call .with_prompt(image, prompt) first and explain its result")

    @abstractmethod
    def with_prompt(self, image: Image.Image, prompt: str | None = None) -> TaskModel:
        """Return the model with one image and one prompt."""

    @abstractmethod
    def with_example_prompt(self, image: Image.Image) -> TaskModel:
        """Return the model with an image and any valid prompt, for `dave doctor`."""

    def _bind(self, constants: dict[str, Tensor], class_names: list[str], task: TaskKind) -> TaskModel:
        return self._wrap(with_inputs(self.model, **constants), class_names, task)

    def _wrap(self, bound: nn.Module, class_names: list[str], task: TaskKind) -> TaskModel:
        model = TaskModel(bound, self.preprocessing, class_names, task=task, spec=self.spec, traits=self.traits)
        model.prepare = self.prepare
        return model


class TextDetector(PromptedModel):
    """A detector of what a text names, such as Grounding DINO; its classes are the tokens of the text."""

    def with_prompt(self, image: Image.Image, prompt: str | None = None) -> TaskModel:
        """Return the detector of what the prompt names, such as "a cat. a dog."."""
        constants = self._tokenize(image, prompt)
        tokens = self.processor.tokenizer.convert_ids_to_tokens(constants["input_ids"][0].tolist())
        width = getattr(self.model.config, "max_text_len", len(tokens))  # type: ignore[union-attr]
        return self._bind(constants, tokens + [""] * (width - len(tokens)), TASKS["ForObjectDetection"])

    def _tokenize(self, image: Image.Image, prompt: str | None) -> dict[str, Tensor]:
        """Return the inputs of the text."""
        if not prompt:
            raise OptionError(f'{self.spec} finds what a text names; give one, --prompt "a cat. a dog."')
        inputs = self.processor(images=to_rgb(image)[0], text=self._format(prompt), return_tensors="pt")
        return {name: value for name, value in inputs.items() if name in _TEXT_INPUTS}

    def _format(self, prompt: str) -> Any:
        return prompt

    def with_example_prompt(self, image: Image.Image) -> TaskModel:
        """Return the detector of a cat."""
        return self.with_prompt(image, "a cat.")


class SentenceDetector(TextDetector):
    """A detector of what sentences name, such as OWL-ViT; its classes are the sentences, separated by full stops."""

    def with_prompt(self, image: Image.Image, prompt: str | None = None) -> TaskModel:
        """Return the detector of what the sentences of the prompt name."""
        tokens = self._tokenize(image, prompt)
        bound = with_inputs(self.model, partial(_repeat_sentences, tokens))
        return self._wrap(bound, self._format(prompt or "")[0], TASKS["ForObjectDetection"])

    def _format(self, prompt: str) -> list[list[str]]:
        return [[sentence.strip() for sentence in prompt.split(".") if sentence.strip()]]


def _repeat_sentences(tokens: dict[str, Tensor], pixels: Tensor) -> dict[str, Tensor]:
    """Return the inputs of OWL-ViT: all sentences ``[S, L]`` once for each image, ``[B S, L]``."""
    repeated = {name: values.to(pixels.device).repeat(len(pixels), 1) for name, values in tokens.items()}
    return {"pixel_values": pixels, **repeated}


class ConceptSegmenter(TextDetector):
    """A detector and segmenter of all objects of one concept, such as SAM 3; the concept is its only class."""

    def with_prompt(self, image: Image.Image, prompt: str | None = None) -> TaskModel:
        """Return the detector of what the prompt names."""
        bound = _OneClass(with_inputs(self.model, **self._tokenize(image, prompt)))
        return self._wrap(bound, [prompt or ""], TASKS["ForObjectDetection"])


class _OneClass(nn.Module):
    """A detector of one class with logits ``[B, Q]`` and corners ``[B, Q, 4]``, in the form of other detectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> SimpleNamespace:
        """Return logits ``[B, Q, 1]``, boxes ``[B, Q, 4]`` as centre and size, and masks ``[B, Q, h, w]``."""
        output = self.model(inputs)
        first, last = output.pred_boxes.chunk(2, -1)
        boxes = torch.cat([(first + last) / 2, last - first], -1)
        return SimpleNamespace(logits=output.pred_logits[..., None], pred_boxes=boxes, pred_masks=output.pred_masks)


class PointSegmenter(PromptedModel):
    """A model that segments the object at a point, such as SAM."""

    def with_prompt(self, image: Image.Image, prompt: str | None = None) -> TaskModel:
        """Return the model of the masks at a point "x,y", in pixels of the image."""
        x, y = self._parse_point(prompt)
        if not (0 <= x < image.width and 0 <= y < image.height):
            raise OptionError(f"point {prompt} lies outside of the picture, {image.width} x {image.height} pixels")
        geometry = Geometry.measure(self.preprocessing, image.size)
        point = [geometry.x.to_input(x), geometry.y.to_input(y)]  # not by the processor: the user may have replaced it
        half = min(image.size) / 16
        box = (max(x - half, 0), max(y - half, 0), min(x + half, image.width), min(y + half, image.height))
        name = f"region:{','.join(f'{corner:g}' for corner in box)}:0"
        task = TaskKind("masks", "", Region(0, box=(0, 0, 1, 1)), (name, Region(0, box=geometry.box_to_input(box))))
        constants = {"input_points": torch.tensor([[[point]]]), "input_labels": torch.tensor([[[1]]])}
        return self._bind(constants, [], task)

    def with_example_prompt(self, image: Image.Image) -> TaskModel:
        """Return the model of the masks at the middle of the image."""
        return self.with_prompt(image, f"{image.width / 2},{image.height / 2}")

    def _parse_point(self, prompt: str | None) -> tuple[float, float]:
        try:
            x, y = (float(part) for part in (prompt or "").split(","))
        except ValueError as error:
            raise OptionError(
                f"{self.spec} segments what lies at a point; give one in pixels of the photograph, --prompt x,y"
            ) from error
        return x, y
