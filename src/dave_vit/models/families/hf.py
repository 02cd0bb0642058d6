"""transformers: classifiers, models of other tasks and text generators, from the hub or a local folder."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.errors import DaveError, ModelError, first_line, require_extra
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.audio import AudioModel
from dave_vit.models.classes import Classes, class_names
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.frozen_factors import freeze_factors
from dave_vit.models.hub import hub_access
from dave_vit.models.inputs import with_inputs
from dave_vit.models.prepare import Prepare
from dave_vit.models.prompted import ConceptSegmenter, PointSegmenter, SentenceDetector, TextDetector
from dave_vit.models.retrieval import PageRetriever
from dave_vit.models.state import RANDOM, Weights, count_classes, read_weights, saved_class_names
from dave_vit.models.tasks import EMBEDDING, TaskKind, TaskModel, find_task
from dave_vit.models.text_generation import TextGenerator
from dave_vit.models.traits import Traits, square_side
from dave_vit.models.video import VideoModel
from dave_vit.models.zero_shot import SimilarityClassifier, ZeroShotAdapter, resolve_prompts

_HEAD = "classifier"
_TEXT_DETECTOR = (TextDetector, "AutoModelForZeroShotObjectDetection")
_PROMPTED: dict[str, tuple[type[TextDetector | PointSegmenter], str]] = {
    "grounding-dino": _TEXT_DETECTOR,
    "mm-grounding-dino": _TEXT_DETECTOR,
    "owlvit": (SentenceDetector, "AutoModelForZeroShotObjectDetection"),
    "owlv2": (SentenceDetector, "AutoModelForZeroShotObjectDetection"),
    "sam": (PointSegmenter, "AutoModelForMaskGeneration"),
    "sam2": (PointSegmenter, "AutoModelForMaskGeneration"),
    "sam3": (ConceptSegmenter, "AutoModel"),
}
# Files that describe the preprocessing of images; the second one holds a tokenizer's settings as well.
_PREPROCESSING = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# By the configuration's problem type; transformers assumes single labels where it is None.
_COMPETE = {None: True, "single_label_classification": True, "multi_label_classification": False}


@dataclass(frozen=True)
class _Checkpoint:
    """A model on the hub or in a local folder.

    Attributes:
        name: on the hub, or the folder.
        config: the configuration of transformers.
        weights: weights that replace the checkpoint's own, "random", or None.
    """

    name: str
    config: Any
    weights: Weights | str | None

    @classmethod
    def open(cls, name: str, weights: Weights | str | None, **options: Any) -> _Checkpoint:
        """Read the configuration."""
        return cls(name, import_transformers().AutoConfig.from_pretrained(name, **options), weights)

    @property
    def spec(self) -> str:
        """The spec under which the model is loaded."""
        return f"hf:{self.name}"

    def has_architecture(self, *suffixes: str) -> bool:
        """Return whether the configuration names an architecture with one of these suffixes."""
        return any(name.endswith(suffixes) for name in getattr(self.config, "architectures", None) or ())

    @property
    def is_backbone(self) -> bool:
        """Whether the checkpoint has no head, and the user gave no weights of one."""
        names = getattr(self.config, "architectures", None) or ("",)
        is_bare = all(name.endswith("Model") for name in names) and not isinstance(self.weights, Weights)
        return is_bare and not hasattr(self.config, "text_config")

    def load_part(self, auto_class: str) -> Any:
        """Load a processor or tokenizer."""
        try:
            return getattr(import_transformers(), auto_class).from_pretrained(self.name)
        except (OSError, ValueError) as error:
            if not Path(self.name).is_dir():
                raise
            part = auto_class.removeprefix("Auto")
            raise ModelError(
                f"{self.spec} cannot be used as an image model: its {part} cannot be read; save it there with "
                "save_pretrained, as the model"
            ) from error

    def build_with_head(self, class_name: str, head: str, advice: str) -> Any:
        """Load the model and refuse it where its head has no trained weights; transformers would draw them."""
        model, missing = self.build(class_name)
        if missing:
            raise ModelError(f"{self.spec} has no trained {head} head ({missing[0]} is missing); {advice}")
        return model

    def build(self, class_name: str, num_labels: int | None = None) -> tuple[Any, list[str]]:
        """Load the model and the names of missing head weights; transformers converts names of older versions."""
        model_class, config = getattr(import_transformers(), class_name), self.config
        if type(config) not in getattr(model_class, "_model_mapping", {type(config): None}):
            raise ModelError(
                f"{self.spec}: transformers has no {class_name.removeprefix('AutoModelFor')} class for "
                f"{config.model_type} models; explain a similarity, --score similarity:FILE, or load it from timm"
            )
        if self.weights == RANDOM:
            return model_class.from_config(config), []
        options = {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
        if isinstance(self.weights, Weights):
            empty = model_class.from_config(config)
            config.num_labels = num_labels or count_classes(self.weights, empty, config.num_labels) or config.num_labels
            model, info = type(empty).from_pretrained(None, state_dict=dict(self.weights.state), **options)
        else:
            model, info = model_class.from_pretrained(self.name, **options)
        mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
        missing = sorted({*info["missing_keys"], *mismatched})
        body = [key for key in missing if not key.startswith(_HEAD)]
        if body:
            source = self.weights.path if isinstance(self.weights, Weights) else self.spec
            raise ModelError(f"{source}: weights of another model ({len(body)} missing or unfit, such as {body[0]!r})")
        return model, missing


def load(
    name: str,
    weights: str | None = None,
    classes: Classes | None = None,
    prompts: Sequence[str] | None = None,
    prepare: Prepare | None = None,
) -> Adapter:
    """Load a model of the transformers library.

    Args:
        name: on the hub, or a local folder with config.json, weights and preprocessor_config.json.
        weights: a local file instead of the folder's own weights, "random", or None.
        classes: names of the classes, or a file of them.
        prompts: one sentence per class, for a zero-shot classifier of a CLIP or SigLIP model.
        prepare: replaces the image processor of a folder that has none.
    """
    file = _read_weights(weights)
    with _loading_errors(name, prepare):
        checkpoint = _Checkpoint.open(name, file)
        if checkpoint.has_architecture("ForConditionalGeneration", "VisionEncoderDecoderModel"):
            return _load_text_generator(checkpoint)
        if checkpoint.has_architecture("ForRetrieval"):
            return _load_retriever(checkpoint)
        if checkpoint.has_architecture("ForVideoClassification"):
            return _load_video(checkpoint)
        if checkpoint.has_architecture("ASTForAudioClassification"):
            return _load_audio(checkpoint)
        if checkpoint.config.model_type in _PROMPTED:
            return _load_prompt_model(checkpoint)
        processor, task = _image_processor(checkpoint, prepare), find_task(checkpoint.config)
        task = EMBEDDING if checkpoint.is_backbone else task
        if task is not None and prompts is None:
            return _load_task_model(task, checkpoint, processor)
        has_text = _has_text_encoder(checkpoint.config)
        if prompts is not None or (classes is not None and has_text):
            sentences, names = resolve_prompts(prompts, classes, checkpoint.spec, least=1)
            return _load_zero_shot(checkpoint, sentences, names, processor)
        prompts_advice = "give prompts (prompts=[...] or --classes FILE), or " if has_text else ""
        advice = f"{prompts_advice}train one with `dave probe`"
        model = checkpoint.build_with_head("AutoModelForImageClassification", "class", advice)
    known = saved_class_names(file) if isinstance(file, Weights) else None
    return wrap(model, processor, classes if classes is not None else known, spec=checkpoint.spec)


def _image_processor(checkpoint: _Checkpoint, prepare: Prepare | None) -> Any:
    """Load the image processor, or build one from the user's options where the folder has none."""
    if prepare is None or not Path(checkpoint.name).is_dir() or _has_file(checkpoint.name, _PREPROCESSING):
        return checkpoint.load_part("AutoImageProcessor")
    size = {"height": prepare.size, "width": prepare.size}
    return import_transformers().ViTImageProcessor(
        size=size, image_mean=list(prepare.mean or ()), image_std=list(prepare.std or ())
    )


def _has_file(folder: str, names: Sequence[str]) -> bool:
    return any((Path(folder) / name).is_file() for name in names)


def _load_task_model(task: TaskKind, checkpoint: _Checkpoint, processor: Any) -> Adapter:
    model = checkpoint.build_with_head(task.auto_class, task.name, "give the weights of a trained model")
    model = freeze_factors(model)
    if checkpoint.config.model_type == "oneformer":
        model = with_inputs(model, task_inputs=_tokenize_task(checkpoint))
    traits = Traits(patch=_patch(checkpoint.config))
    names = [] if task is EMBEDDING else _labels(checkpoint.config)
    return TaskModel(model, preprocessing(processor), names, task=task, spec=checkpoint.spec, traits=traits)


def _tokenize_task(checkpoint: _Checkpoint) -> Tensor:
    """Return the tokens ``[1, L]`` of the sentence that tells OneFormer its task."""
    options = {"padding": "max_length", "truncation": True, "max_length": checkpoint.config.task_seq_len}
    tokens = checkpoint.load_part("AutoTokenizer")("the task is panoptic", **options, return_tensors="pt")
    return tokens["input_ids"] * tokens["attention_mask"]  # type: ignore[no-any-return]


def _load_text_generator(checkpoint: _Checkpoint) -> Adapter:
    """Load a vision-language model with its processor, or a captioner with its image processor and tokenizer."""
    config, spec = checkpoint.config, checkpoint.spec
    model = freeze_factors(checkpoint.build(config.architectures[0])[0])
    traits = Traits(patch=_patch(getattr(config, "vision_config", None) or getattr(config, "encoder", None)))
    if config.architectures[0] == "VisionEncoderDecoderModel":
        pixels, tokenizer = checkpoint.load_part("AutoImageProcessor"), checkpoint.load_part("AutoTokenizer")
        return TextGenerator(model, None, pixels, tokenizer, spec=spec, traits=traits)
    processor = checkpoint.load_part("AutoProcessor")
    return TextGenerator(model, processor, processor.image_processor, processor.tokenizer, spec=spec, traits=traits)


def _load_retriever(checkpoint: _Checkpoint) -> Adapter:
    model, _ = checkpoint.build(checkpoint.config.architectures[0])
    traits = Traits(patch=_patch(getattr(checkpoint.config.vlm_config, "vision_config", None)))
    return PageRetriever(model, checkpoint.load_part("AutoProcessor"), spec=checkpoint.spec, traits=traits)


def _load_video(checkpoint: _Checkpoint) -> Adapter:
    model = checkpoint.build_with_head("AutoModelForVideoClassification", "class", "give a trained model")
    traits = Traits(patch=_patch(checkpoint.config), compete=_COMPETE.get(checkpoint.config.problem_type))
    is_jepa = checkpoint.config.model_type == "vjepa2"
    processor = checkpoint.load_part("AutoVideoProcessor" if is_jepa else "AutoImageProcessor")
    return VideoModel(model, processor, _labels(checkpoint.config), spec=checkpoint.spec, traits=traits)


def _load_audio(checkpoint: _Checkpoint) -> Adapter:
    model = checkpoint.build_with_head("AutoModelForAudioClassification", "class", "give a trained model")
    traits = Traits(patch=_patch(checkpoint.config), compete=_COMPETE.get(checkpoint.config.problem_type))
    extractor = checkpoint.load_part("AutoFeatureExtractor")
    return AudioModel(model, extractor, _labels(checkpoint.config), spec=checkpoint.spec, traits=traits)


def _load_prompt_model(checkpoint: _Checkpoint) -> Adapter:
    """Load a detector of what a text names, or a model that segments the object at a point."""
    adapter_class, auto_class = _PROMPTED[checkpoint.config.model_type]
    model = freeze_factors(checkpoint.build(auto_class)[0])
    processor = checkpoint.load_part("AutoProcessor")
    traits = Traits(patch=_patch(getattr(checkpoint.config, "vision_config", None)))
    pixels = preprocessing(processor.image_processor)
    return adapter_class(model, processor, pixels, spec=checkpoint.spec, traits=traits)


def _has_text_encoder(config: Any) -> bool:
    """Return whether a checkpoint is an image and text model, not a classifier made of its image encoder."""
    return hasattr(config, "text_config") and not any("Classification" in name for name in config.architectures or ())


def _read_weights(weights: str | None) -> Weights | str | None:
    return weights if weights in (None, RANDOM) else read_weights(str(weights))


def wrap(model: nn.Module, processor: Any, classes: Classes | None, *, spec: str) -> Adapter:
    """Return the adapter of a classifier and its image processor."""
    known = _labels(model.config)
    nameless = all(re.fullmatch(r"LABEL_\d+", label) for label in known)
    names = class_names(len(known), classes, known=None if nameless else known)
    compete = _COMPETE.get(model.config.problem_type)  # type: ignore[union-attr,arg-type]
    traits = Traits(patch=_patch(model.config), compete=compete if len(names) > 1 else None)
    return Classifier(model, preprocessing(processor), names, spec=spec, traits=traits)


def _labels(config: Any) -> list[str]:
    return [label for _, label in sorted(config.id2label.items())]


def _patch(config: Any) -> int | None:
    return square_side(getattr(config, "patch_size", None))


class Classifier(Adapter):
    """A classifier whose output object holds the logits; positions are interpolated for other image sizes."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, classes]``."""
        native = getattr(self.model.config, "image_size", None)
        native = tuple(native) if isinstance(native, list | tuple) else (native, native)
        able = "interpolate_pos_encoding" in inspect.signature(self.model.forward).parameters
        other = able and tuple(inputs.shape[-2:]) != native
        logits: Tensor = self.model(inputs, **({"interpolate_pos_encoding": True} if other else {})).logits
        return logits


def _process_image(processor: Any, image: Image.Image) -> Tensor:
    """Return the pixels ``[1, C, H, W]`` of an image processor."""
    pixels: Tensor = processor(images=image, return_tensors="pt")["pixel_values"]
    if pixels.ndim != 4:
        raise ModelError(
            f"{type(processor).__name__} makes {pixels.ndim}-dimensional patches instead of images "
            "[1, C, H, W]; choose a model with a fixed image size"
        )
    return pixels


def preprocessing(processor: Any) -> Preprocessing:
    """Return the preprocessing of an image processor."""
    return Preprocessing.of_processor(partial(_process_image, processor), processor)


def backbone(name: str, weights: str | None, names: Sequence[str]) -> tuple[Adapter, str]:
    """Return a model with an untrained head, and the path of that head; the checkpoint's own head is left out."""
    file = _read_weights(weights)
    with _loading_errors(name):
        checkpoint = _Checkpoint.open(name, file, num_labels=len(names))
        processor = checkpoint.load_part("AutoImageProcessor")
        model, _ = checkpoint.build("AutoModelForImageClassification", num_labels=len(names))
    if not isinstance(getattr(model, _HEAD, None), nn.Linear):
        raise ModelError(f"{checkpoint.spec} has no single linear head, so it cannot be probed; choose another model")
    return wrap(model, processor, names, spec=checkpoint.spec), _HEAD


def _load_zero_shot(checkpoint: _Checkpoint, prompts: list[str], names: list[str], processor: Any) -> Adapter:
    model_type = checkpoint.config.model_type
    if not _has_text_encoder(checkpoint.config):
        raise ModelError(f"{checkpoint.spec} is a {model_type} model without a text half; leave the prompts out")
    model, _ = checkpoint.build("AutoModel")
    tokenizer = checkpoint.load_part("AutoTokenizer")
    # SigLIP was trained with sentences padded to one length, and without a mask.
    padding = "max_length" if model_type.startswith("siglip") else True
    tokens = tokenizer(prompts, padding=padding, truncation=True, return_tensors="pt")
    return wrap_zero_shot(model, tokenizer, dict(tokens), names, processor, spec=checkpoint.spec)


def wrap_zero_shot(
    model: Any, tokenizer: Any, tokens: dict[str, Tensor], names: Sequence[str], processor: Any, *, spec: str
) -> Adapter:
    """Return the zero-shot classifier of a CLIP or SigLIP model."""
    text = text_features(model.eval(), tokens)
    bias = getattr(model, "logit_bias", None)
    classifier = SimilarityClassifier(model, encode_image, text, scale=model.logit_scale.exp(), bias=bias)
    traits = Traits(patch=_patch(model.config.vision_config), compete=classifier.compete)
    pixels = preprocessing(processor)
    return ZeroShotAdapter(classifier, pixels, names, tokenizer=tokenizer, tokens=tokens, spec=spec, traits=traits)


def encode_image(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return features ``[B, D]`` of images."""
    return _features(model.get_image_features(pixel_values=inputs))  # type: ignore[operator]


def text_features(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    """Return features ``[K, D]`` of sentences."""
    with torch.no_grad():
        return _features(model.get_text_features(**tokens))


def _features(output: Any) -> Tensor:
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features


@contextmanager
def _loading_errors(name: str, prepare: Prepare | None = None) -> Iterator[None]:
    """Turn errors of transformers into one line; the hub is not contacted for a local folder."""
    spec, local = f"hf:{name}", Path(name).is_dir()
    if local:
        if not _has_file(name, ["config.json"]):
            raise ModelError(
                f"{name}: config.json is missing; save model and image processor there with save_pretrained"
            )
        if not _has_file(name, _PREPROCESSING) and not (prepare and prepare.complete):
            raise ModelError(
                f"{name}: {_PREPROCESSING[0]} is missing; save the image processor there with save_pretrained, or say "
                "what it does, such as --size 224 --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5"
            )
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"{name}: no such folder; give the folder of a saved model, or its name on the hub")
    try:
        with nullcontext() if local else hub_access(spec), quiet():
            yield
    except DaveError:
        raise
    except Exception as error:  # processors of other models fail in any way
        raise ModelError(f"{spec} cannot be used as an image model: {first_line(error)[:200]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and reports of transformers; what matters in them is raised."""
    logging = import_transformers().utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def import_transformers() -> Any:
    """Import the library, or raise an error that says how to install it."""
    with require_extra("transformers", "hf"):
        import transformers
    return transformers


FAMILIES.register("hf")(
    Family(
        load,
        "hf:NAME_OR_FOLDER",
        "models of transformers, from the hub or a local folder",
        extra="hf",
        backbone=backbone,
    )
)
