"""Vision-language models of transformers in the table of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.models.checkpoint import import_transformers as package
from dave_vit.models.inputs import with_inputs
from dave_vit.models.pixel_formats import ImageTokens, PackedPatches
from model_coverage.entry import Entry
from model_coverage.hf_entries import PLAIN, TWO_HALVES, VIT
from model_coverage.hf_tasks import built
from model_coverage.hf_vision_language import ANSWER, IMAGE, LANGUAGE, MARKS, OPT, ROTARY, START, WORDS, ask, prompt

_QWEN = {"depth": 2, "num_heads": 2, "hidden_size": 32, "patch_size": 14, "spatial_merge_size": 2}
_QWEN_MARKS = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": START}


def _logit_of_prompt(output: Any) -> Tensor:
    logits: Tensor = output.logits_per_image[:, 0]
    return logits


def _llava() -> Any:
    halves = {
        "vision_config": package().CLIPVisionConfig(**VIT),
        "text_config": package().LlamaConfig(**LANGUAGE),
        "image_token_index": IMAGE,
    }
    return package().LlavaConfig(**halves)


def _paligemma() -> Any:
    vision, text = package().SiglipVisionConfig(**VIT), package().GemmaConfig(**LANGUAGE, head_dim=8)
    return package().PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, projection_dim=32)


def _blip2() -> Any:
    bridge = {**PLAIN, "encoder_hidden_size": 32, "vocab_size": 64, "cross_attention_frequency": 1}
    text = package().OPTConfig(**OPT, **WORDS)
    values = {"vision_config": VIT, "qformer_config": bridge, "text_config": text}
    return package().Blip2Config(num_query_tokens=4, image_token_index=IMAGE, **values)


def _captioner() -> Any:
    decoder = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "activation_function": "gelu"}
    halves = package().ViTConfig(**VIT), package().GPT2Config(**decoder, **MARKS, vocab_size=64, use_cache=False)
    return package().VisionEncoderDecoderConfig.from_encoder_decoder_configs(*halves)


def _two_halves(name: str) -> Any:
    return getattr(package(), f"{name}Config")(**TWO_HALVES)


def _idefics(name: str, attention: str) -> nn.Module:
    vision = getattr(package(), f"{name}VisionConfig")(**VIT)
    text, marks = package().LlamaConfig(**LANGUAGE), {"image_token_id": IMAGE, "scale_factor": 2}
    config = getattr(package(), f"{name}Config")(vision_config=vision, text_config=text, **marks)
    model = built(f"{name}ForConditionalGeneration", lambda: config, attention)
    ids = prompt(4)
    return with_inputs(model, ImageTokens(model, ids), attention_mask=torch.ones_like(ids), use_cache=False)


def _qwen(name: str, vision: dict[str, Any], attention: str) -> nn.Module:
    text = {**LANGUAGE, "rope_parameters": ROTARY}
    config = getattr(package(), f"{name}Config")(vision_config={**_QWEN, **vision}, text_config=text, **_QWEN_MARKS)
    model = built(f"{name}ForConditionalGeneration", lambda: config, attention)
    ids = prompt(4, framed=True)
    kinds = (ids == IMAGE).int()
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, "use_cache": False}
    return with_inputs(model, PackedPatches(), **asked)


_QWEN2 = {"embed_dim": 32, "mlp_ratio": 2}
_QWEN25 = {"out_hidden_size": 32, "intermediate_size": 64, "window_size": 56, "fullatt_block_indexes": [1]}
_TYPES = {"token_type_ids": torch.zeros_like(prompt(16))}
_FOUR = {"input_ids": torch.tensor([[1, 5, 6, 2]])}

# family, class, configuration, constant inputs, score
_ARCHITECTURES: tuple[tuple[str, str, Callable[[], Any], dict[str, Any], Any], ...] = (
    ("CLIP, both halves", "CLIPModel", partial(_two_halves, "CLIP"), _FOUR, _logit_of_prompt),
    ("SigLIP, both halves", "SiglipModel", partial(_two_halves, "Siglip"), _FOUR, _logit_of_prompt),
    ("LLaVA", "LlavaForConditionalGeneration", _llava, ask(16, use_cache=False), ANSWER),
    (
        "PaliGemma",
        "PaliGemmaForConditionalGeneration",
        _paligemma,
        {**ask(16, use_cache=False), **_TYPES},
        ANSWER,
    ),
    (
        "ViT and GPT-2",
        "VisionEncoderDecoderModel",
        _captioner,
        {"decoder_input_ids": torch.tensor([[1, 5, 6]]), "use_cache": False},
        ANSWER,
    ),
    ("BLIP-2", "Blip2ForConditionalGeneration", _blip2, ask(4), ANSWER),
)
_ARRANGED: tuple[tuple[str, str, Callable[[str], nn.Module], int], ...] = (
    ("Idefics 3", "Idefics3ForConditionalGeneration", partial(_idefics, "Idefics3"), 64),
    ("SmolVLM", "SmolVLMForConditionalGeneration", partial(_idefics, "SmolVLM"), 64),
    ("Qwen2-VL", "Qwen2VLForConditionalGeneration", partial(_qwen, "Qwen2VL", _QWEN2), 56),
    ("Qwen2.5-VL", "Qwen2_5_VLForConditionalGeneration", partial(_qwen, "Qwen2_5_VL", _QWEN25), 56),
)
_ATTENTION = {"sdpa": "", "eager": ", eager attention"}


def entries() -> list[Entry]:
    """What is checked of transformers' models of pictures and words, with fused and with eager attention."""
    found = []
    for attention, suffix in _ATTENTION.items():
        for family, name, config, constants, score in _ARCHITECTURES:
            build = partial(built, name, config, attention, **constants)
            found.append(Entry("transformers", family + suffix, name, build, score=score))
        for family, name, arranged, side in _ARRANGED:
            build = partial(arranged, attention)
            found.append(Entry("transformers", family + suffix, name, build, (side, side), score=ANSWER))
    return found
