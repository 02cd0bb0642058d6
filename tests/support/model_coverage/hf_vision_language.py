"""Vision-language models of transformers whose image tokens stand in the text, or are attended from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.scores import Token
from dave_vit.engine.targets import Score
from dave_vit.models.checkpoint import import_transformers as package
from dave_vit.models.inputs import with_inputs
from dave_vit.models.pixel_formats import PackedPatches
from model_coverage.entry import Entry
from model_coverage.hf_entries import PLAIN, VIT
from model_coverage.hf_tasks import built

IMAGE, START, END = 60, 58, 59  # tokens of the vocabulary below
MARKS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WORDS = {"vocab_size": 64, "max_position_embeddings": 128, **MARKS}
LANGUAGE = {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2, **WORDS}  # grouped-query attention
OPT = {"num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "hidden_size": 32, "word_embed_proj_dim": 32}
ROTARY = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
ANSWER = Token(9)
_WINDOWS = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_PACKED = {"depth": 2, "num_heads": 2, "hidden_size": 32, "patch_size": 14, "spatial_merge_size": 2}
_PACKED |= {"intermediate_size": 64, "out_hidden_size": 32}
_BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
_SIZES = {"image_sizes": torch.tensor([[64, 64]])}
_QUESTION = {"input_ids": torch.tensor([[1, 5, 6, 2]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}


def prompt(images: int, *, framed: bool = False) -> Tensor:
    """Return a question of three words after as many image tokens."""
    tokens = [IMAGE] * images
    return torch.tensor([[1, *([START, *tokens, END] if framed else tokens), 5, 6, 7]])


def ask(images: int, **more: Any) -> dict[str, Any]:
    """Return the constant inputs of a question about an image of so many tokens."""
    ids = prompt(images)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def kinds(images: int, name: str, *, framed: bool = False) -> dict[str, Any]:
    """Return the inputs of a model that is told which tokens are of the image."""
    ids = prompt(images, framed=framed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), name: (ids == IMAGE).int(), "use_cache": False}


def _siglip() -> Any:
    return package().SiglipVisionConfig(**VIT)


def _pixtral_tower() -> Any:
    return package().PixtralVisionConfig(**VIT, head_dim=16)


def _qwen2() -> Any:
    return package().Qwen2Config(**LANGUAGE)


def _qwen3() -> Any:
    vision = {**_PACKED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {**LANGUAGE, "rope_parameters": {**ROTARY, "mrope_interleaved": True}, "head_dim": 8}
    marks = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": START}
    return package().Qwen3VLConfig(vision_config=vision, text_config=text, **marks)


def _glm() -> Any:
    vision, text = {**_PACKED, "image_size": 56}, {**LANGUAGE, "rope_parameters": ROTARY}
    marks = {"image_token_id": IMAGE, "video_token_id": 61, "image_start_token_id": START, "image_end_token_id": END}
    return package().Glm4vConfig(vision_config=vision, text_config=text, **marks)


def _gemma3() -> Any:
    text = package().Gemma3TextConfig(**LANGUAGE, **_WINDOWS)
    return package().Gemma3Config(
        vision_config=_siglip(), text_config=text, mm_tokens_per_image=4, image_token_index=IMAGE
    )


def _internvl() -> Any:
    vision = package().InternVLVisionConfig(**{**VIT, "image_size": [64, 64], "patch_size": [16, 16]})
    return package().InternVLConfig(vision_config=vision, text_config=_qwen2(), image_token_id=IMAGE)


def _llava_next() -> Any:
    vision, text = package().CLIPVisionConfig(**VIT), package().LlamaConfig(**LANGUAGE)
    tiles = {"image_token_index": IMAGE, "image_grid_pinpoints": [[64, 64]]}
    return package().LlavaNextConfig(vision_config=vision, text_config=text, **tiles)


def _onevision() -> Any:
    tiles = {"image_token_index": IMAGE, "video_token_index": 61, "image_grid_pinpoints": [[64, 64]]}
    return package().LlavaOnevisionConfig(vision_config=_siglip(), text_config=_qwen2(), **tiles)


def _mistral3() -> Any:
    text = package().MistralConfig(**LANGUAGE, head_dim=8)
    marks = {"image_token_index": IMAGE, "spatial_merge_size": 2}
    return package().Mistral3Config(vision_config=_pixtral_tower(), text_config=text, **marks)


def _pixtral() -> Any:
    text = package().MistralConfig(**LANGUAGE, head_dim=8)
    features = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": IMAGE}
    return package().LlavaConfig(vision_config=_pixtral_tower(), text_config=text, **features)


def _aya() -> Any:
    text = package().Cohere2Config(**LANGUAGE, **_WINDOWS)
    return package().AyaVisionConfig(
        vision_config=_siglip(), text_config=text, image_token_index=IMAGE, downsample_factor=2
    )


def _ovis2() -> Any:
    tokens = {"vocab_size": 40, "hidden_stride": 2, "num_visual_indicator_tokens": 5, "tokenize_function": "softmax"}
    marks = {"image_token_id": IMAGE, "visual_indicator_token_ids": [50, 51, 52, 53, 54]}
    sizes = {"hidden_size": 32, "vocab_size": 64}
    halves = {"vision_config": package().Ovis2VisionConfig(**VIT, **tokens), "text_config": _qwen2()}
    return package().Ovis2Config(**halves, **marks, **sizes)


def _florence2() -> Any:
    stages = {"depths": [1, 1], "embed_dim": [16, 32], "num_heads": [2, 2], "num_groups": [2, 2], "window_size": 4}
    patches = {"patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True]}
    layers = {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in _BART.items()}
    text = package().BartConfig(d_model=32, **layers, **WORDS, decoder_start_token_id=2)
    vision = {**stages, **patches, "projection_dim": 32}
    return package().Florence2Config(vision_config=vision, text_config=text, image_token_id=IMAGE)


def _instruct() -> Any:
    bridge = {**PLAIN, "encoder_hidden_size": 32, "vocab_size": 64, "cross_attention_frequency": 1}
    parts = {"vision_config": VIT, "qformer_config": bridge, "text_config": package().OPTConfig(**OPT, **WORDS)}
    return package().InstructBlipConfig(**parts, num_query_tokens=4, image_token_index=IMAGE)


def kosmos2(image_tokens: int = 4, vocabulary: int = 64) -> Any:
    text = {"embed_dim": 32, "layers": 2, "ffn_dim": 64, "attention_heads": 2, **WORDS, "vocab_size": vocabulary}
    return package().Kosmos2Config(text_config=text, vision_config=VIT, latent_query_num=image_tokens)


def _git() -> Any:
    return package().GitConfig(vision_config=VIT, **PLAIN, **WORDS)


def _blip() -> Any:
    text = {**PLAIN, **WORDS, "encoder_hidden_size": 32, "sep_token_id": 2, "projection_dim": 32}
    return package().BlipConfig(vision_config={**VIT, "projection_dim": 32}, text_config=text, projection_dim=32)


def _vilt() -> Any:
    return package().ViltConfig(**VIT, **WORDS, num_labels=7)


class _BlipAnswer(nn.Module):
    """BLIP's three parts up to the logits of the answer, which its own forward pass keeps for itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Any:
        """Return the output of the decoder."""
        image = self.model.vision_model(pixel_values=pixels).last_hidden_state
        question, answer = (torch.tensor([words]).expand(len(pixels), -1) for words in ([1, 5, 6, 2], [1, 5]))
        read = self.model.text_encoder(input_ids=question, encoder_hidden_states=image)[0]
        return self.model.text_decoder(input_ids=answer, encoder_hidden_states=read)


def _build_blip(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    return _BlipAnswer(built(name, config, attention))


def _build_tiled(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    """A model that takes the whole image and its tiles."""
    tokens = ask(16 + 16 + 4, use_cache=False)  # the whole image, the only tile, and a mark at the end of its rows
    return with_inputs(built(name, config, attention), _repeat_image, **tokens, **_SIZES)


def _repeat_image(pixels: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.stack([pixels, pixels], 1)}


def _build_packed(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    """A model that takes the patches of all images in one row."""
    asked = kinds(4, "mm_token_type_ids", framed=True)
    return with_inputs(built(name, config, attention), PackedPatches(), **asked)


Build = Callable[[str, Callable[[], Any], str], nn.Module]


def build_with(**constants: Any) -> Build:
    return partial(build_asked, constants)


def build_asked(constants: dict[str, Any], name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    return built(name, config, attention, **constants)


_FOUR = ask(4, use_cache=False)
# family, class, configuration, how it is asked, side of the image
_ARCHITECTURES: tuple[tuple[str, str, Callable[[], Any], Build, int], ...] = (
    ("Qwen3-VL", "Qwen3VLForConditionalGeneration", _qwen3, _build_packed, 56),
    ("GLM-4V", "Glm4vForConditionalGeneration", _glm, _build_packed, 56),
    ("Gemma 3", "Gemma3ForConditionalGeneration", _gemma3, build_with(**kinds(4, "token_type_ids")), 64),
    ("InternVL 3", "InternVLForConditionalGeneration", _internvl, build_with(**_FOUR), 64),
    ("LLaVA-NeXT", "LlavaNextForConditionalGeneration", _llava_next, _build_tiled, 64),
    ("LLaVA-OneVision", "LlavaOnevisionForConditionalGeneration", _onevision, _build_tiled, 64),
    ("Mistral 3", "Mistral3ForConditionalGeneration", _mistral3, build_with(**_FOUR, **_SIZES), 64),
    ("Pixtral", "LlavaForConditionalGeneration", _pixtral, build_with(**ask(16, use_cache=False), **_SIZES), 64),
    ("Aya Vision", "AyaVisionForConditionalGeneration", _aya, build_with(**_FOUR), 64),
    ("Ovis 2", "Ovis2ForConditionalGeneration", _ovis2, build_with(**_FOUR), 64),
    (
        "Florence-2",
        "Florence2ForConditionalGeneration",
        _florence2,
        build_with(**ask(65, use_cache=False), decoder_input_ids=torch.tensor([[2, 5, 6]])),
        64,
    ),
    (
        "InstructBLIP",
        "InstructBlipForConditionalGeneration",
        _instruct,
        build_with(**_FOUR, qformer_input_ids=_QUESTION["input_ids"]),
        64,
    ),
    ("Kosmos-2", "Kosmos2ForConditionalGeneration", kosmos2, build_with(**kinds(4, "image_embeds_position_mask")), 64),
    ("GIT", "GitForCausalLM", _git, build_with(**_QUESTION, use_cache=False), 64),
    ("BLIP, captions", "BlipForConditionalGeneration", _blip, build_with(**_QUESTION), 64),
    ("BLIP, questions", "BlipForQuestionAnswering", _blip, _build_blip, 64),
    ("ViLT", "ViltForQuestionAnswering", _vilt, build_with(**_QUESTION), 64),
)


def entries() -> list[Entry]:
    """Return the entries of these models; of ViLT a class is explained, of all others the next word."""
    return [
        Entry("transformers", family, name, partial(build, name, config, "sdpa"), (side, side), score=_score(name))
        for family, name, config, build, side in _ARCHITECTURES
    ]


def _score(name: str) -> Score | None:
    return None if name.startswith("Vilt") else ANSWER
