"""transformers: classifiers, models of other tasks and text generators, from the hub or a local folder."""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.errors import ModelError
from dave_vit.models.adapter import Adapter, Classes, Preprocessing, class_names
from dave_vit.models.checkpoint import HEAD, Checkpoint, import_transformers, loading_errors
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.frozen_factors import freeze_factors
from dave_vit.models.inputs import with_inputs
from dave_vit.models.pixel_formats import image_preprocessing
from dave_vit.models.prepare import Prepare
from dave_vit.models.recordings import AudioModel, VideoModel
from dave_vit.models.retrieval import PageRetriever, SimilarityClassifier, ZeroShotAdapter, resolve_prompts
from dave_vit.models.state import Weights
from dave_vit.models.tasks import EMBEDDING, PROMPTED, TASKS, TaskKind, TaskModel
from dave_vit.models.text_generation import TextGenerator


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
    with loading_errors(name, prepare):
        checkpoint = Checkpoint.open(name, weights)
        load_kind = checkpoint.find(_LOADERS)
        if load_kind is not None:
            return load_kind(checkpoint)
        if checkpoint.config.model_type in PROMPTED:
            return _load_prompt_model(checkpoint)
        processor = _image_processor(checkpoint, prepare)
        task = EMBEDDING if checkpoint.is_backbone else checkpoint.find(TASKS)
        if task is not None and prompts is None:
            return _load_task_model(task, checkpoint, processor)
        has_text = checkpoint.has_text_encoder
        if prompts is not None or (classes is not None and has_text):
            sentences, names = resolve_prompts(prompts, classes, checkpoint.spec, least=1)
            return _load_zero_shot(checkpoint, sentences, names, processor)
        prompts_advice = "give prompts (prompts=[...] or --classes FILE), or " if has_text else ""
        advice = f"{prompts_advice}train one with `dave probe`"
        model = checkpoint.build_with_head("AutoModelForImageClassification", advice=advice)
    file = checkpoint.weights
    known = file.class_names if isinstance(file, Weights) else None
    return wrap(model, processor, classes if classes is not None else known, spec=checkpoint.spec)


def _image_processor(checkpoint: Checkpoint, prepare: Prepare | None) -> Any:
    """Load the image processor, or build one from the user's options where the folder has none."""
    if prepare is None or not Path(checkpoint.name).is_dir() or checkpoint.has_processor:
        return checkpoint.load_part("AutoImageProcessor")
    size = {"height": prepare.size, "width": prepare.size}
    colours = {"image_mean": list(prepare.mean or ()), "image_std": list(prepare.std or ())}
    return import_transformers().ViTImageProcessor(size=size, **colours)


def _load_task_model(task: TaskKind, checkpoint: Checkpoint, processor: Any) -> Adapter:
    model = checkpoint.build_with_head(task.auto_class, task.name, "give the weights of a trained model")
    model = freeze_factors(model)
    if checkpoint.config.model_type == "oneformer":
        options = {"padding": "max_length", "truncation": True, "max_length": checkpoint.config.task_seq_len}
        tokens = checkpoint.load_part("AutoTokenizer")("the task is panoptic", **options, return_tensors="pt")
        model = with_inputs(model, task_inputs=tokens["input_ids"] * tokens["attention_mask"])  # [1, L]
    names = [] if task is EMBEDDING else checkpoint.labels
    return TaskModel(model, preprocessing(processor), names, task=task, **checkpoint.facts())


def _load_text_generator(checkpoint: Checkpoint) -> Adapter:
    """Load a vision-language model with its processor, or a captioner with its image processor and tokenizer."""
    architecture = checkpoint.architectures[0]
    model = freeze_factors(checkpoint.build(architecture)[0])
    if architecture == "VisionEncoderDecoderModel":
        parts = None, checkpoint.load_part("AutoImageProcessor"), checkpoint.load_part("AutoTokenizer")
    else:
        processor = checkpoint.load_part("AutoProcessor")
        parts = processor, _adjust_image_processor(processor), processor.tokenizer
    return TextGenerator(model, *parts, **checkpoint.facts())


def _adjust_image_processor(processor: Any) -> Any:
    """Return the image processor with the options that the whole processor gives it, such as whether to cut tiles."""
    own, kwargs = processor.image_processor, getattr(processor, "valid_processor_kwargs", None)
    before = getattr(kwargs, "_defaults", {}).get("images_kwargs", {})  # of transformers before 5.23
    for name, value in {**before, **(getattr(processor, "images_kwargs", None) or {})}.items():
        if name != "max_patches":  # the folder of a Pix2Struct says how many its model has places for
            setattr(own, name, value)
    if hasattr(processor, "spatial_merge_size"):  # Pixtral and Mistral 3
        own.patch_size = processor.patch_size * processor.spatial_merge_size
    return own


def _load_retriever(checkpoint: Checkpoint) -> Adapter:
    model, processor = checkpoint.build(checkpoint.architectures[0])[0], checkpoint.load_part("AutoProcessor")
    pixels = image_preprocessing(processor.image_processor, checkpoint.spec)
    return PageRetriever(model, processor, pixels, **checkpoint.facts())


def _load_recordings(kind: type[AudioModel | VideoModel], task: str, processor: str, checkpoint: Checkpoint) -> Adapter:
    """Load a classifier of sounds or clips."""
    model = checkpoint.build_with_head(f"AutoModelFor{task}")
    processor = "AutoVideoProcessor" if checkpoint.config.model_type == "vjepa2" else processor
    facts = checkpoint.facts(compete=checkpoint.do_labels_compete)
    return kind(model, checkpoint.load_part(processor), checkpoint.labels, **facts)


def _load_prompt_model(checkpoint: Checkpoint) -> Adapter:
    """Load a detector of what a text names, a classifier of answers, or a model that segments the object at a point."""
    adapter_class, auto_class = PROMPTED[checkpoint.config.model_type]
    model = freeze_factors(checkpoint.build_with_head(auto_class, "answer"))
    processor = checkpoint.load_part("AutoProcessor")
    return adapter_class(model, processor, preprocessing(processor.image_processor), **checkpoint.facts())


_LOADERS: dict[str, Callable[[Checkpoint], Adapter]] = {
    "ForConditionalGeneration": _load_text_generator,
    "GitForCausalLM": _load_text_generator,
    "BlipForQuestionAnswering": _load_text_generator,
    "VisionEncoderDecoderModel": _load_text_generator,
    "ForRetrieval": _load_retriever,
    "ForVideoClassification": partial(_load_recordings, VideoModel, "VideoClassification", "AutoImageProcessor"),
    "ASTForAudioClassification": partial(_load_recordings, AudioModel, "AudioClassification", "AutoFeatureExtractor"),
}
"""By the end of an architecture's name."""


def wrap(model: nn.Module, processor: Any, classes: Classes | None, *, spec: str) -> Adapter:
    """Return the adapter of a classifier and its image processor."""
    checkpoint = Checkpoint(spec.removeprefix("hf:"), model.config, None)
    known = checkpoint.labels
    nameless = all(re.fullmatch(r"LABEL_\d+", label) for label in known)
    names = class_names(len(known), classes, known=None if nameless else known)
    facts = checkpoint.facts(compete=checkpoint.do_labels_compete if len(names) > 1 else None)
    return Classifier(model, preprocessing(processor), names, **facts)


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
    with loading_errors(name):
        checkpoint = Checkpoint.open(name, weights, num_labels=len(names))
        processor = checkpoint.load_part("AutoImageProcessor")
        model, _ = checkpoint.build("AutoModelForImageClassification", num_labels=len(names))
    if not isinstance(getattr(model, HEAD, None), nn.Linear):
        raise ModelError(f"{checkpoint.spec} has no single linear head, so it cannot be probed; choose another model")
    return wrap(model, processor, names, spec=checkpoint.spec), HEAD


def _load_zero_shot(checkpoint: Checkpoint, prompts: list[str], names: list[str], processor: Any) -> Adapter:
    """Return the zero-shot classifier of a CLIP or SigLIP model."""
    model_type = checkpoint.config.model_type
    if not checkpoint.has_text_encoder:
        raise ModelError(f"{checkpoint.spec} is a {model_type} model without a text half; leave the prompts out")
    model = checkpoint.build("AutoModel")[0].eval()
    tokenizer = checkpoint.load_part("AutoTokenizer")
    # SigLIP was trained with sentences padded to one length, and without a mask.
    padding = "max_length" if model_type.startswith("siglip") else True
    tokens = dict(tokenizer(prompts, padding=padding, truncation=True, return_tensors="pt"))
    scale, bias = model.logit_scale.exp(), getattr(model, "logit_bias", None)
    classifier = SimilarityClassifier(model, encode_image, text_features(model, tokens), scale=scale, bias=bias)
    facts = checkpoint.facts(compete=classifier.compete)
    return ZeroShotAdapter(classifier, preprocessing(processor), names, tokenizer=tokenizer, tokens=tokens, **facts)


def encode_image(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return features ``[B, D]`` of images."""
    return _features(model.get_image_features(pixel_values=inputs))  # type: ignore[operator]


def text_features(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    """Return features ``[K, D]`` of sentences."""
    with torch.no_grad():
        return _features(model.get_text_features(**tokens))


def _features(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output  # type: ignore[no-any-return]


_SUMMARY = "models of transformers, from the hub or a local folder"
FAMILIES.register("hf")(Family(load, "hf:NAME_OR_FOLDER", _SUMMARY, extra="hf", backbone=backbone))
