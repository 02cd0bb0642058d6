"""Models that take a prompt besides the image: a text to detect, a point to segment, a question."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dave_vit.data.geometry import Geometry
from dave_vit.data.images import to_rgb
from dave_vit.engine.scores import Region
from dave_vit.errors import InputError, OptionError
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.inputs import with_inputs
from dave_vit.models.tasks import TASKS, TaskKind, TaskModel
from dave_vit.models.traits import Traits


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
        bound, pixels = with_inputs(self.model, **constants), self.preprocessing
        model = TaskModel(bound, pixels, class_names, task=task, spec=self.spec, traits=self.traits)
        model.prepare = self.prepare
        return model


class TextDetector(PromptedModel):
    """A detector of what a text names, such as Grounding DINO; its classes are the tokens of the text."""

    def with_prompt(self, image: Image.Image, prompt: str | None = None) -> TaskModel:
        """Return the detector of what the prompt names, such as "a cat. a dog."."""
        if not prompt:
            raise OptionError(f'{self.spec} finds what a text names; give one, --prompt "a cat. a dog."')
        inputs = self.processor(images=to_rgb(image)[0], text=prompt, return_tensors="pt")
        constants = {name: value for name, value in inputs.items() if name not in ("pixel_values", "pixel_mask")}
        tokens = self.processor.tokenizer.convert_ids_to_tokens(constants["input_ids"][0].tolist())
        width = getattr(self.model.config, "max_text_len", len(tokens))  # type: ignore[union-attr]
        return self._bind(constants, tokens + [""] * (width - len(tokens)), TASKS["ForObjectDetection"])

    def with_example_prompt(self, image: Image.Image) -> TaskModel:
        """Return the detector of a cat."""
        return self.with_prompt(image, "a cat.")


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
