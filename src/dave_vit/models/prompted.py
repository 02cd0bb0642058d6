"""Models that need more than a picture before anything can be said of it: what to find, a point, a question."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dave_vit.data.images import to_rgb
from dave_vit.engine.scores import Region
from dave_vit.errors import InputError, OptionError
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.inputs import with_inputs
from dave_vit.models.tasks import TASKS, Task, TaskModel
from dave_vit.models.traits import Traits


class Prompted(Adapter):
    """A model that takes a prompt: `ask` makes of it a model of one picture's pixels."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Refused: what it says of a picture depends on the prompt."""
        raise InputError(
            f"{self.spec} takes a prompt; ask it first, .ask(picture, prompt), and explain what comes back"
        )

    @abstractmethod
    def ask(self, picture: Image.Image, prompt: str | None = None) -> TaskModel:
        """The model with one picture and one prompt."""

    @abstractmethod
    def tried(self, picture: Image.Image) -> TaskModel:
        """The model with any prompt at all, to be examined."""


class _OfProcessor(Prompted):
    """With a processor of pictures and prompts."""

    def __init__(self, model: Any, processor: Any, preprocess: Preprocessing, *, spec: str, traits: Traits) -> None:
        super().__init__(model, preprocess, [], spec=spec, traits=traits)
        self.processor = processor

    def _asked(self, constants: dict[str, Tensor], names: list[str], task: Task) -> TaskModel:
        pixels = with_inputs(self.model, **constants)
        asked = TaskModel(pixels, self.preprocessing, names, spec=self.spec, traits=self.traits)
        asked.task = task
        return asked


class TextDetector(_OfProcessor):
    """Finds what a text names, such as Grounding DINO; its classes are the tokens of the text."""

    def ask(self, picture: Image.Image, prompt: str | None = None) -> TaskModel:
        """The detector of what the prompt names, such as "a cat. a dog."."""
        if not prompt:
            raise OptionError(f'{self.spec} finds what a text names; give one, --prompt "a cat. a dog."')
        made = self.processor(images=to_rgb(picture)[0], text=prompt, return_tensors="pt")
        said = {name: value for name, value in made.items() if name not in ("pixel_values", "pixel_mask")}
        tokens = self.processor.tokenizer.convert_ids_to_tokens(said["input_ids"][0].tolist())
        width = getattr(self.model.config, "max_text_len", len(tokens))  # type: ignore[union-attr]
        return self._asked(said, tokens + [""] * (width - len(tokens)), TASKS["ForObjectDetection"])

    def tried(self, picture: Image.Image) -> TaskModel:
        """As asked for a cat."""
        return self.ask(picture, "a cat.")


class PointSegmenter(_OfProcessor):
    """Segments what lies under a point, such as SAM."""

    def ask(self, picture: Image.Image, prompt: str | None = None) -> TaskModel:
        """The masks of what lies at a place, x and y in pixels of the picture."""
        x, y = self._point(prompt)
        if not (0 <= x < picture.width and 0 <= y < picture.height):
            raise OptionError(f"point {prompt} lies outside of the picture, {picture.width} x {picture.height} pixels")
        points, labels = torch.tensor([[[x, y]]]), torch.tensor([[1]])
        options = {"input_points": points, "input_labels": labels, "return_tensors": "pt"}
        made = self.processor(images=to_rgb(picture)[0], **options)
        half = min(picture.size) / 16
        box = (max(x - half, 0), max(y - half, 0), min(x + half, picture.width), min(y + half, picture.height))
        usual = f"region:{','.join(f'{corner:g}' for corner in box)}:0"
        task = Task("masks", "", Region(0, box=(0.0, 0.0, 1.0, 1.0)), usual)
        return self._asked({name: made[name] for name in ("input_points", "input_labels")}, [], task)

    def tried(self, picture: Image.Image) -> TaskModel:
        """At the middle of the picture."""
        return self.ask(picture, f"{picture.width / 2},{picture.height / 2}")

    def _point(self, prompt: str | None) -> tuple[float, float]:
        try:
            x, y = (float(part) for part in (prompt or "").split(","))
        except ValueError as error:
            raise OptionError(
                f"{self.spec} segments what lies at a point; give one in pixels of the photograph, --prompt x,y"
            ) from error
        return x, y
