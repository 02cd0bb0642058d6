"""transformers: models of the hub or of a local folder; classifiers, models of other tasks, models that write text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.errors import ModelError, first_line, missing_extra
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.classes import Classes, class_names
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.hub import hub_access
from dave_vit.models.prepare import Prepare
from dave_vit.models.prompted import PointSegmenter, TextDetector
from dave_vit.models.state import RANDOM, Weights, count_classes, read_weights, saved_class_names
from dave_vit.models.tasks import TaskKind, TaskModel, find_task
from dave_vit.models.text_generation import TextGenerator
from dave_vit.models.traits import Traits, square_side
from dave_vit.models.video import VideoModel
from dave_vit.models.zero_shot import SimilarityClassifier, ZeroShotAdapter, resolve_prompts

_HEAD = "classifier"
_TEXT = (TextDetector, "AutoModelForZeroShotObjectDetection")
_PROMPTED: dict[str, tuple[type[TextDetector] | type[PointSegmenter], str]] = {
    "grounding-dino": _TEXT,
    "mm-grounding-dino": _TEXT,
    "owlvit": _TEXT,
    "owlv2": _TEXT,
    "sam": (PointSegmenter, "AutoModelForMaskGeneration"),
}
_APART = ("AutoImageProcessor", "AutoTokenizer")
# One of these says how pictures are preprocessed; the second one holds a tokenizer's settings as well.
_PREPROCESSING = ("preprocessor_config.json", "processor_config.json")
# By the configuration's problem type; transformers itself takes classifiers that say nothing for the first kind.
_COMPETE = {None: True, "single_label_classification": True, "multi_label_classification": False}


def load(
    name: str,
    weights: str | None = None,
    classes: Classes | None = None,
    prompts: Sequence[str] | None = None,
    prepare: Prepare | None = None,
) -> Adapter:
    """A model of the transformers library.

    Args:
        name: on the hub, or a local folder with config.json, weights and preprocessor_config.json.
        weights: a local file instead of the folder's own weights, "random", or None.
        classes: names of the classes, or a file of them.
        prompts: makes a zero-shot classifier of a CLIP or SigLIP model; one sentence a class.
        prepare: stands in for the image processor of a folder that has none.
    """
    spec, given = f"hf:{name}", _read(weights)
    with _readable(name, spec, prepare):
        config = package().AutoConfig.from_pretrained(name)
        if writes(config):
            return _writer(name, config, given)
        if any(each.endswith("ForVideoClassification") for each in config.architectures or ()):
            return _video(name, config, given)
        if config.model_type in _PROMPTED:
            return _prompted(name, config, given)
        processor = _processor(name, prepare)
        task = find_task(config)
        if task is not None and prompts is None:
            return _of_task(task, name, config, given, processor)
        if prompts is not None or (classes is not None and _is_two_halves(config)):
            return _zero_shot(name, config, given, *resolve_prompts(prompts, classes, spec, least=1), processor)
        model, missing = _made(package().AutoModelForImageClassification, name, config, given)
    if missing:  # transformers would draw them at random and go on
        prompted = "give prompts (prompts=[...] or --classes FILE), or " if _is_two_halves(config) else ""
        raise ModelError(
            f"{spec} has no trained class head ({missing[0]} is missing); {prompted}train one with `dave probe`"
        )
    known = saved_class_names(given) if isinstance(given, Weights) else None
    return wrap(model, processor, classes if classes is not None else known, spec=spec)


def _processor(name: str, prepare: Prepare | None) -> Any:
    """The image processor of a model, or one that does what the user says where it has none."""
    if prepare is None or not Path(name).is_dir() or _has(name, _PREPROCESSING):
        return package().AutoImageProcessor.from_pretrained(name)
    size = {"height": prepare.size, "width": prepare.size}
    return package().ViTImageProcessor(
        size=size, image_mean=list(prepare.mean or ()), image_std=list(prepare.std or ())
    )


def _has(folder: str, files: Sequence[str]) -> bool:
    return any((Path(folder) / one).is_file() for one in files)


def _of_task(task: TaskKind, name: str, config: Any, weights: Weights | str | None, processor: Any) -> Adapter:
    """A model whose output is no class logits."""
    model, missing = _made(getattr(package(), task.auto_class), name, config, weights)
    if missing:
        raise ModelError(
            f"hf:{name} lacks weights of its {task.name} head ({missing[0]}); give those of a trained model"
        )
    names = [config.id2label[index] for index in sorted(config.id2label)]
    traits = Traits(patch=_patch(config))
    return TaskModel(model, preprocessing(processor), names, task=task, spec=f"hf:{name}", traits=traits)


def writes(config: Any) -> bool:
    """Whether a configuration is that of a model that writes text about pictures."""
    names = getattr(config, "architectures", None) or ()
    return any(name.endswith(("ForConditionalGeneration", "VisionEncoderDecoderModel")) for name in names)


def _writer(name: str, config: Any, weights: Weights | str | None) -> Adapter:
    """A vision-language model with its processor, or a captioner with its image processor and its tokenizer."""
    model, _ = _made(getattr(package(), config.architectures[0]), name, config, weights)
    traits = Traits(patch=_patch(getattr(config, "vision_config", None) or getattr(config, "encoder", None)))
    if config.architectures[0] == "VisionEncoderDecoderModel":
        pixels, words = (getattr(package(), kind).from_pretrained(name) for kind in _APART)
        return TextGenerator(model, None, pixels, words, spec=f"hf:{name}", traits=traits)
    processor = package().AutoProcessor.from_pretrained(name)
    return TextGenerator(
        model, processor, processor.image_processor, processor.tokenizer, spec=f"hf:{name}", traits=traits
    )


def _video(name: str, config: Any, weights: Weights | str | None) -> Adapter:
    model, missing = _made(package().AutoModelForVideoClassification, name, config, weights)
    if missing:
        raise ModelError(f"hf:{name} has no trained class head ({missing[0]} is missing); give a trained model")
    processor = package().AutoImageProcessor.from_pretrained(name)
    names = [config.id2label[index] for index in sorted(config.id2label)]
    compete = _COMPETE.get(config.problem_type)
    return VideoModel(model, processor, names, spec=f"hf:{name}", traits=Traits(patch=_patch(config), compete=compete))


def _prompted(name: str, config: Any, weights: Weights | str | None) -> Adapter:
    """A detector of what a text names, or a model that segments what lies under a point."""
    made, automatic = _PROMPTED[config.model_type]
    model, _ = _made(getattr(package(), automatic), name, config, weights)
    processor = package().AutoProcessor.from_pretrained(name)
    traits = Traits(patch=_patch(getattr(config, "vision_config", None)))
    return made(model, processor, preprocessing(processor.image_processor), spec=f"hf:{name}", traits=traits)


def _is_two_halves(config: Any) -> bool:
    """Whether a checkpoint is of an image and text model, rather than of a classifier made of its image half."""
    return hasattr(config, "text_config") and not any("Classification" in name for name in config.architectures or ())


def _read(weights: str | None) -> Weights | str | None:
    return weights if weights in (None, RANDOM) else read_weights(str(weights))


def wrap(model: nn.Module, processor: Any, classes: Classes | None, *, spec: str) -> Adapter:
    """A classifier with its image processor."""
    labels: dict[int, str] = model.config.id2label  # type: ignore[union-attr,assignment]
    known = [labels[index] for index in sorted(labels)]
    nameless = all(re.fullmatch(r"LABEL_\d+", label) for label in known)
    names = class_names(len(known), classes, known=None if nameless else known)
    compete = _COMPETE.get(model.config.problem_type)  # type: ignore[union-attr,arg-type]
    traits = Traits(patch=_patch(model.config), compete=compete if len(names) > 1 else None)
    return Classifier(model, preprocessing(processor), names, spec=spec, traits=traits)


def _patch(config: Any) -> int | None:
    return square_side(getattr(config, "patch_size", None))


class Classifier(Adapter):
    """A classifier whose output object holds the logits; other image sizes than its own are interpolated."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        native = getattr(self.model.config, "image_size", None)
        native = tuple(native) if isinstance(native, list | tuple) else (native, native)
        able = "interpolate_pos_encoding" in inspect.signature(self.model.forward).parameters
        other = able and tuple(inputs.shape[-2:]) != native
        logits: Tensor = self.model(inputs, **({"interpolate_pos_encoding": True} if other else {})).logits
        return logits


@dataclass(frozen=True)
class _Processed:
    """The image processor as a transform."""

    processor: Any

    def __call__(self, image: Image.Image) -> Tensor:
        pixels: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"]
        if pixels.ndim != 4:
            raise ModelError(
                f"{type(self.processor).__name__} makes {pixels.ndim}-dimensional patches instead of images "
                "[1, C, H, W]; choose a model with a fixed image size"
            )
        return pixels


def preprocessing(processor: Any) -> Preprocessing:
    """What the image processor does, and the colours behind it."""
    return Preprocessing.of_processor(_Processed(processor), processor)


def backbone(name: str, weights: str | None, names: Sequence[str]) -> tuple[Adapter, str]:
    """A model with an untrained head, and the path of that head; the checkpoint's own head, if any, is left out."""
    spec, given = f"hf:{name}", _read(weights)
    with _readable(name, spec):
        config = package().AutoConfig.from_pretrained(name, num_labels=len(names))
        processor = package().AutoImageProcessor.from_pretrained(name)
        model, _ = _made(package().AutoModelForImageClassification, name, config, given, num_labels=len(names))
    if not isinstance(getattr(model, _HEAD, None), nn.Linear):
        raise ModelError(f"{spec} has no single linear head, so it cannot be probed; choose another model")
    return wrap(model, processor, names, spec=spec), _HEAD


def _made(
    automatic: Any, name: str, config: Any, weights: Weights | str | None, num_labels: int | None = None
) -> tuple[Any, list[str]]:
    """A model, and what is missing of its head; transformers itself converts the names of older versions."""
    if weights == RANDOM:
        return automatic.from_config(config), []
    options = {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
    if isinstance(weights, Weights):
        empty = automatic.from_config(config)
        config.num_labels = num_labels or count_classes(weights, empty, config.num_labels)
        model, info = type(empty).from_pretrained(None, state_dict=dict(weights.state), **options)
    else:
        model, info = automatic.from_pretrained(name, **options)
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    missing = sorted({*info["missing_keys"], *mismatched})
    body = [key for key in missing if not key.startswith(_HEAD)]
    if body:
        source = weights.path if isinstance(weights, Weights) else f"hf:{name}"
        raise ModelError(f"{source}: weights of another model ({len(body)} missing or unfit, such as {body[0]!r})")
    return model, missing


def _zero_shot(
    name: str, config: Any, weights: Weights | str | None, prompts: list[str], names: list[str], processor: Any
) -> Adapter:
    if not _is_two_halves(config):
        raise ModelError(f"hf:{name} is a {config.model_type} model without a text half; leave the prompts out")
    model, _ = _made(package().AutoModel, name, config, weights)
    tokenizer = package().AutoTokenizer.from_pretrained(name)
    # SigLIP was trained with sentences padded to one length, and without a mask.
    padding = "max_length" if config.model_type.startswith("siglip") else True
    tokens = tokenizer(prompts, padding=padding, truncation=True, return_tensors="pt")
    return wrap_zero_shot(model, tokenizer, dict(tokens), names, processor, spec=f"hf:{name}")


def wrap_zero_shot(
    model: Any, tokenizer: Any, tokens: dict[str, Tensor], names: Sequence[str], processor: Any, *, spec: str
) -> Adapter:
    """A CLIP or SigLIP model that classifies by prompts."""
    text = text_features(model.eval(), tokens)
    bias = getattr(model, "logit_bias", None)
    classifier = SimilarityClassifier(model, encode_image, text, scale=model.logit_scale.exp(), bias=bias)
    traits = Traits(patch=_patch(model.config.vision_config), compete=classifier.compete)
    pixels = preprocessing(processor)
    return ZeroShotAdapter(classifier, pixels, names, tokenizer=tokenizer, tokens=tokens, spec=spec, traits=traits)


def encode_image(model: nn.Module, inputs: Tensor) -> Tensor:
    """Features ``[B, D]`` of images."""
    return _features(model.get_image_features(pixel_values=inputs))  # type: ignore[operator]


def text_features(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    """Features ``[K, D]`` of sentences."""
    with torch.no_grad():
        return _features(model.get_text_features(**tokens))


def _features(output: Any) -> Tensor:
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features


@contextmanager
def _readable(name: str, spec: str, prepare: Prepare | None = None) -> Iterator[None]:
    """What transformers raises on unfit folders and names, in one line; nobody is asked about a local folder."""
    local = Path(name).is_dir()
    if local:
        if not _has(name, ["config.json"]):
            raise ModelError(
                f"{name}: config.json is missing; save model and image processor there with save_pretrained"
            )
        if not _has(name, _PREPROCESSING) and not (prepare and prepare.complete):
            raise ModelError(
                f"{name}: {_PREPROCESSING[0]} is missing; save the image processor there with save_pretrained, or say "
                "what it does, such as --size 224 --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5"
            )
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"{name}: no such folder; give the folder of a saved model, or its name on the hub")
    try:
        with nullcontext() if local else hub_access(spec), quiet():
            yield
    except (ValueError, KeyError, RuntimeError, ImportError, OSError) as error:
        raise ModelError(f"{spec} cannot be used as an image classifier: {first_line(error)[:200]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and reports: what matters of them is raised."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def package() -> Any:
    """The library, or an error that says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("transformers", "hf") from error
    return transformers


FAMILIES.register("hf")(
    Family(
        load,
        "hf:NAME_OR_FOLDER",
        "models of transformers, from the hub or a local folder",
        extra="hf",
        zero_shot=True,
        bare=True,
        backbone=backbone,
    )
)
