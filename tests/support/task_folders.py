"""Save small detectors, segmentation, depth and video models in folders, as save_pretrained does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models
from dave_vit.models.checkpoint import quiet
from model_coverage import architectures

_GREY = {"image_mean": [128 / 255] * 3, "image_std": [127 / 255] * 3}  # 128 is exactly nothing
_SQUARE = {"size": {"height": 64, "width": 64}}
_EDGES = {"size": {"shortest_edge": 64, "longest_edge": 96}}
_PROMPT = ("a", "cat", ".")
_PROCESSORS = {"Grounding DINO": "GroundingDinoProcessor", "OWLv2": "Owlv2Processor"}
_PROCESSORS |= {"SAM 3 with a text, object": "Sam3Processor"}

# family: class of the processor, and its options
PIXELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DETR": ("DetrImageProcessor", _EDGES),
    "Deformable DETR": ("DeformableDetrImageProcessor", _EDGES),
    "YOLOS": ("YolosImageProcessor", _SQUARE),
    "SegFormer, segmentation": ("SegformerImageProcessor", _SQUARE),
    "UPerNet": ("SegformerImageProcessor", _SQUARE),
    "Mask2Former, class": ("Mask2FormerImageProcessor", _SQUARE),
    "DPT": ("DPTImageProcessor", _SQUARE),
    "Depth Anything": ("DPTImageProcessor", {"size": {"height": 56, "width": 56}}),
    "Grounding DINO": ("GroundingDinoImageProcessor", _SQUARE),
    "SAM with a point": ("SamImageProcessor", {"size": {"longest_edge": 64}, "pad_size": {"height": 64, "width": 64}}),
    "RT-DETR": ("RTDetrImageProcessor", {**_SQUARE, "do_normalize": True}),
    "RF-DETR": ("RfDetrImageProcessor", _SQUARE),
    "MaskFormer, mask": ("MaskFormerImageProcessor", _SQUARE),
    "OneFormer, mask": ("OneFormerImageProcessor", _SQUARE),
    "EoMT, mask": ("EomtImageProcessor", {"size": {"shortest_edge": 64, "longest_edge": 64}, "do_pad": True}),
    "OWLv2": ("Owlv2ImageProcessor", _SQUARE),
    "SAM 2 with a point": ("Sam2ImageProcessor", _SQUARE),
    "SAM 3 with a text, object": ("Sam3ImageProcessor", _SQUARE),
    "VideoMAE": ("VideoMAEImageProcessor", {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}),
    "TimeSformer": ("VideoMAEImageProcessor", {**_SQUARE, "do_center_crop": False}),
    "ViViT": ("VivitImageProcessor", {**_SQUARE, "do_center_crop": False}),
    "V-JEPA 2": ("VJEPA2VideoProcessor", {**_SQUARE, "do_center_crop": False}),
}


def _words() -> Any:
    """The tokenizer of BERT with a few words; the numbers of its marks are those that Grounding DINO looks for."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", *(f"w{number}" for number in range(1, 200))]
    names[100:103] = ["[UNK]", "[CLS]", "[SEP]"]
    names[1:4] = _PROMPT
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 102), ("[CLS]", 101))
    marks = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=made, **marks, model_input_names=inputs, model_max_length=16)


def save(family: str, folder: Path) -> Path:
    """Save model and processor of a family in a folder."""
    import transformers

    (entry,) = [entry for entry in architectures("transformers") if entry.family == family]
    model = tiny_models.drawn(entry.build())
    while not hasattr(model, "save_pretrained"):  # with constant inputs, or with frozen factors
        model = model.model
    with quiet():
        model.save_pretrained(folder)
    name, options = PIXELS[family]
    grey = {"image_mean": [128 / 127.5 - 1] * 3, "image_std": [1.0] * 3} if family == "ViViT" else _GREY
    pixels = getattr(transformers, name)(**options, **grey)
    if family in _PROCESSORS:
        pixels = getattr(transformers, _PROCESSORS[family])(pixels, _words())
    if family.startswith("OneFormer"):
        _words().save_pretrained(folder)
    if family.endswith("a point"):
        pixels = getattr(transformers, name.replace("Image", ""))(pixels)
    pixels.save_pretrained(folder)
    return folder
