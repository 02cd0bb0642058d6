"""Models of transformers for other tasks than classification, some of which take a prompt besides the image."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.data.geometry import Geometry
from dave_vit.data.images import to_rgb
from dave_vit.engine.scores import ClassLogit, Query, Region, Value, select_embeddings
from dave_vit.engine.targets import Score
from dave_vit.errors import InputError, OptionError
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.inputs import with_inputs

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
NamedScore = tuple[str, Score]
"""A score, and its name as `--score` takes it."""


@dataclass(frozen=True)
class TaskKind:
    """A task that models are trained for.

    Attributes:
        name: one word, such as "detection".
        auto_class: the class of transformers that loads such models.
        check_score: the score that `dave doctor` checks.
        default_score: what `dave explain` explains by default: a score, "boxes" for all detections, or None where the
            user must choose a score.
        advice: what to do where the user must choose a score.
    """

    name: str
    auto_class: str
    check_score: Score
    default_score: NamedScore | Literal["boxes"] | None = None
    advice: str = "give what to explain, such as --score query:3:CLASS"


EMBEDDING = TaskKind(
    "embedding",
    "AutoModel",
    lambda output: select_embeddings(output).mean(1),
    advice="compare it with another picture, --score similarity:FILE, or train a head with `dave probe`",
)
"""Backbones without a head."""


TASKS = {
    "ForObjectDetection": TaskKind("detection", "AutoModelForObjectDetection", Query(0, 0), "boxes"),
    "ForSemanticSegmentation": TaskKind(
        "segmentation", "AutoModelForSemanticSegmentation", Region(0, box=(0, 0, 1, 1))
    ),
    "ForUniversalSegmentation": TaskKind("segmentation", "AutoModelForUniversalSegmentation", Query(0, 0)),
    "ForInstanceSegmentation": TaskKind("segmentation", "AutoModelForUniversalSegmentation", Query(0, 0)),
    "ForDepthEstimation": TaskKind("depth", "AutoModelForDepthEstimation", Value(), ("value", Value())),
}
"""Tasks by the suffix of the architecture's name."""


class TaskModel(Adapter):
    """A detector, a segmentation or a depth model; it returns the model's own output object.

    Args:
        args: as of `Adapter`.
        task: what the model is trained for.
        options: as of `Adapter`.
    """

    def __init__(self, *args: Any, task: TaskKind, **options: Any) -> None:
        super().__init__(*args, **options)
        self.task = task


class PromptedModel(Adapter):
    """A model that takes a prompt; `with_prompt` turns it into a model of one image's pixels.

    Args:
        model: the model of transformers.
        processor: turns images and prompts into the model's inputs; None where the model takes no prompt.
        preprocess: turns an image into an input tensor.
        options: as of `Adapter`.
    """

    def __init__(self, model: Any, processor: Any, preprocess: Preprocessing, **options: Any) -> None:
        super().__init__(model, preprocess, [], **options)
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

    def _wrap(self, bound: nn.Module, class_names: list[str], task: TaskKind) -> TaskModel:
        model = TaskModel(bound, self.preprocessing, class_names, task=task, spec=self.spec, traits=self.traits)
        model.prepare = self.prepare
        return model


Bind = Callable[[Any, Any, str, dict[str, Tensor]], tuple[nn.Module, list[str]]]
"""From model, processor, prompt and its tokens to the model of images, and the names of its classes."""


class TextPrompted(PromptedModel):
    """A detector of what a text names, or a classifier of the answers to a question.

    Args:
        args: as of `PromptedModel`.
        bind: returns the model with the inputs of a prompt, and the names of its classes.
        split: returns a prompt as the processor takes it.
        task: what the model with its prompt does.
        advice: how a prompt is given.
        options: as of `Adapter`.
    """

    def __init__(
        self,
        *args: Any,
        bind: Bind,
        split: Callable[[str], Any] = str,
        task: TaskKind = TASKS["ForObjectDetection"],
        advice: str = 'finds what a text names; give one, --prompt "a cat. a dog."',
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._bind, self._split, self.task, self._advice = bind, split, task, advice

    def with_prompt(self, image: Image.Image, prompt: str | None = None) -> TaskModel:
        """Return the model of what the prompt names, such as "a cat. a dog."."""
        if not prompt:
            raise OptionError(f"{self.spec} {self._advice}")
        inputs = self.processor(images=to_rgb(image)[0], text=self._split(prompt), return_tensors="pt")
        text = {name: value for name, value in inputs.items() if name in TEXT_INPUTS}
        bound, names = self._bind(self.model, self.processor, prompt, text)
        return self._wrap(bound, names, self.task)

    def with_example_prompt(self, image: Image.Image) -> TaskModel:
        """Return the model of a cat."""
        return self.with_prompt(image, "a cat.")


def _bind_question(model: Any, processor: Any, prompt: str, text: dict[str, Tensor]) -> tuple[nn.Module, list[str]]:
    """Bind a question, of which each class is an answer."""
    return with_inputs(model, **text), [label for _, label in sorted(model.config.id2label.items())]


def _bind_tokens(model: Any, processor: Any, prompt: str, text: dict[str, Tensor]) -> tuple[nn.Module, list[str]]:
    """Bind a text of which each token is a class, as in Grounding DINO."""
    tokens = processor.tokenizer.convert_ids_to_tokens(text["input_ids"][0].tolist())
    width = getattr(model.config, "max_text_len", len(tokens))
    return with_inputs(model, **text), tokens + [""] * (width - len(tokens))


def _bind_sentences(model: Any, processor: Any, prompt: str, text: dict[str, Tensor]) -> tuple[nn.Module, list[str]]:
    """Bind sentences, each of which is a class, as in OWL-ViT."""
    return with_inputs(model, partial(_repeat_sentences, text)), _split_sentences(prompt)[0]


def _split_sentences(prompt: str) -> list[list[str]]:
    """Split a prompt at full stops."""
    return [[sentence.strip() for sentence in prompt.split(".") if sentence.strip()]]


def _repeat_sentences(tokens: dict[str, Tensor], pixels: Tensor) -> dict[str, Tensor]:
    """Return the inputs of OWL-ViT: all sentences ``[S, L]`` once for each image, ``[B S, L]``."""
    repeated = {name: values.to(pixels.device).repeat(len(pixels), 1) for name, values in tokens.items()}
    return {"pixel_values": pixels, **repeated}


def _bind_concept(model: Any, processor: Any, prompt: str, text: dict[str, Tensor]) -> tuple[nn.Module, list[str]]:
    """Bind a concept, which is the only class, as in SAM 3; all of its objects are also segmented."""
    return _OneClass(with_inputs(model, **text)), [prompt]


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
        return self._wrap(with_inputs(self.model, **constants), [], task)

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


_DETECTION, _MASKS = "AutoModelForZeroShotObjectDetection", "AutoModelForMaskGeneration"
_SENTENCES = partial(TextPrompted, bind=_bind_sentences, split=_split_sentences)
_QUESTIONS = partial(
    TextPrompted,
    bind=_bind_question,
    task=TaskKind("answers", "", ClassLogit(0)),
    advice='answers a question; give one, --prompt "how many cats are there?"',
)
PROMPTED: dict[str, tuple[Callable[..., PromptedModel], str]] = {
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), (partial(TextPrompted, bind=_bind_tokens), _DETECTION)),
    **dict.fromkeys(("owlvit", "owlv2"), (_SENTENCES, _DETECTION)),
    **dict.fromkeys(("sam", "sam2"), (PointSegmenter, _MASKS)),
    "sam3": (partial(TextPrompted, bind=_bind_concept), "AutoModel"),
    "vilt": (_QUESTIONS, "AutoModelForVisualQuestionAnswering"),
}
"""Adapter and class of transformers by the type of the model."""
