"""Newer vision-language models and document models of transformers in the table of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.targets import Score
from dave_vit.models.checkpoint import import_transformers as package
from dave_vit.models.frozen_factors import REPLACEMENTS, FrozenFactors
from dave_vit.models.inputs import with_inputs
from dave_vit.models.pixel_formats import PackedPatches
from dave_vit.models.retrieval import LateInteraction, by_page, total_score
from model_coverage.entry import Entry
from model_coverage.hf_entries import PLAIN, VIT
from model_coverage.hf_tasks import LABELS, built
from model_coverage.hf_vision_language import (
    ANSWER,
    IMAGE,
    LANGUAGE,
    MARKS,
    ROTARY,
    START,
    WORDS,
    ask,
    build_with,
    kinds,
)

_TEXT = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, **WORDS}
_SPOKEN = {"decoder_input_ids": torch.tensor([[1, 5, 6]]), "use_cache": False}


def _qwen35() -> Any:
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 32, "patch_size": 14, "spatial_merge_size": 2}
    vision |= {"intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 16}
    rotary = {**ROTARY, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    text = {**LANGUAGE, **linear, "linear_num_value_heads": 4, "rope_parameters": rotary, "head_dim": 8}
    text |= {"layer_types": ["linear_attention", "full_attention"]}
    marks = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": START}
    return package().Qwen3_5Config(vision_config=vision, text_config=text, **marks)


def gemma4(places: int = 8) -> Any:
    vision = {
        **PLAIN,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pooling_kernel_size": 2,
        "position_embedding_size": places,
    }
    text = {**LANGUAGE, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    text |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    marks = {"image_token_id": IMAGE, "video_token_id": 61, "audio_token_id": 62}
    return package().Gemma4Config(vision_config=vision, text_config=text, audio_config=None, **marks)


def _gemma3n() -> Any:
    vision = {"architecture": "mobilenetv3_small_050", "hidden_size": 288, "vocab_size": 4, "vocab_offset": 64}
    text = {**LANGUAGE, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    text |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    text |= {
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0],
        "intermediate_size": 64,
        "altup_num_inputs": 2,
    }
    audio = {
        "hidden_size": 32,
        "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1,
        "vocab_offset": 68,
        "vocab_size": 4,
    }
    marks = {"image_token_id": IMAGE, "audio_token_id": 62, "vision_soft_tokens_per_image": 4}
    return package().Gemma3nConfig(vision_config=vision, text_config=text, audio_config=audio, **marks)


def _llama4() -> Any:
    vision = {**VIT, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    vision |= {"intermediate_size": 128, "num_attention_heads": 2}
    text = {**LANGUAGE, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}
    return package().Llama4Config(vision_config=vision, text_config=text, image_token_index=IMAGE)


def mllama(tiles: int = 1) -> Any:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}
    vision |= {"intermediate_size": 64, "image_size": 64, "patch_size": 16, "max_num_tiles": tiles}
    ratios = [[rows, columns] for rows in range(1, tiles + 1) for columns in range(1, tiles // rows + 1)]
    vision |= {"intermediate_layers_indices": [0], "vision_output_dim": 64, "supported_aspect_ratios": ratios}
    text = {**LANGUAGE, "cross_attention_layers": [1]}
    return package().MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)


def _perception() -> Any:
    sizes = {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 64}
    sizes |= {"global_pool": "", "use_post_transformer_norm": False}
    name = "vit_pe_core_tiny_patch16_384"
    vision = package().TimmWrapperConfig(architecture=name, model_args=sizes, do_pooling=False)
    text = package().LlamaConfig(**LANGUAGE)
    return package().PerceptionLMConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=61)


def _paligemma2() -> Any:
    vision, text = package().SiglipVisionConfig(**VIT), package().Gemma2Config(**LANGUAGE, head_dim=8)
    return package().PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, projection_dim=32)


def _reader(encoder: str, values: dict[str, Any], decoder: str) -> Any:
    halves = getattr(package(), f"{encoder}Config")(**values), getattr(package(), f"{decoder}Config")(**_TEXT)
    return package().VisionEncoderDecoderConfig.from_encoder_decoder_configs(*halves)


def _pix2struct() -> Any:
    text = {"hidden_size": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 64, **MARKS}
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 3 * 16 * 16, "d_ff": 64, "d_kv": 16, "seq_len": 16}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    return package().Pix2StructConfig(vision_config=vision, text_config=text)


def _layoutlm() -> Any:
    sizes = {"input_size": 64, "patch_size": 16, "coordinate_size": 6, "shape_size": 4, "rel_2d_pos_bins": 8}
    return package().LayoutLMv3Config(**PLAIN, **WORDS, **sizes, num_labels=LABELS)


def _cut(side: int, images: Tensor) -> Tensor:
    """Return patches ``[B, rows, columns, side, side, C]``."""
    rows, columns = images.shape[2] // side, images.shape[3] // side
    return images.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 3, 5, 1)


def _patch_gemma(images: Tensor) -> dict[str, Any]:
    patches = _cut(16, images).flatten(3)  # [B, rows, columns, numbers]
    rows, columns = torch.meshgrid(*map(torch.arange, patches.shape[1:3]), indexing="ij")
    places = torch.stack([columns, rows], -1).reshape(1, -1, 2).repeat(len(images), 1, 1)
    return {"pixel_values": patches.flatten(1, 2), "image_position_ids": places}


def _build_gemma(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    return with_inputs(built(name, config, attention), _patch_gemma, **kinds(4, "mm_token_type_ids"))


def _build_packed(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    asked = kinds(4, "mm_token_type_ids", framed=True)
    return with_inputs(built(name, config, attention), PackedPatches(), **asked)


def _build_long(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    """A question of more words than one step of the linear attention takes."""
    asked = kinds(4, "mm_token_type_ids", framed=True)
    more = {
        key: torch.cat([value, value[:, -1:].repeat(1, 70)], 1) for key, value in asked.items() if key != "use_cache"
    }
    return with_inputs(built(name, config, attention), PackedPatches(), **more, use_cache=False)


class _Pix2Struct(nn.Module):
    """Pix2Struct with rows and columns of the patches as numbers of their own: they do not depend on the image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Any:
        """Return the output of the decoder."""
        encoder: Any = self.model.encoder
        patches = _cut(16, pixel_values).flatten(3)
        rows, columns = (torch.arange(count) for count in patches.shape[1:3])
        places = encoder.embeddings.row_embedder(rows)[:, None] + encoder.embeddings.column_embedder(columns)
        embedded = (encoder.embeddings.patch_projection(patches) + places).flatten(1, 2)
        states = encoder.layernorm(encoder.encoder(embedded).last_hidden_state)
        words = torch.tensor([[1, 5, 6]]).expand(len(pixel_values), -1)
        return self.model(encoder_outputs=(states,), decoder_input_ids=words, use_cache=False)


def _build_pix2struct(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    model = package().Pix2StructForConditionalGeneration(config())
    return FrozenFactors(_Pix2Struct(model), REPLACEMENTS["pix2struct"])


def _crop(images: Tensor) -> dict[str, Any]:
    return {"pixel_values": images[:, None]}


def _build_crops(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    return with_inputs(built(name, config, attention), _crop, **ask(16, use_cache=False))


def _tile(images: Tensor) -> dict[str, Any]:
    return {"pixel_values": images[:, None, None]}


def _build_tiles(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    ids = torch.tensor([[1, IMAGE, 5, 6, 7]])
    one = torch.ones(1, 1, dtype=torch.long)
    tiles = {"aspect_ratio_ids": one, "aspect_ratio_mask": one[..., None]}
    tiles |= {"cross_attention_mask": torch.ones(1, 5, 1, 1, dtype=torch.long)}
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    return with_inputs(built(name, config, attention), _tile, **tiles, **asked)


_BOXES = torch.tensor([[[0, 0, 0, 0], [10, 20, 30, 40], [50, 20, 70, 40], [0, 0, 0, 0]]])
_PAGE = {"input_ids": torch.tensor([[1, 5, 6, 2]]), "bbox": _BOXES}
_DONUT = {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
_TYPED = {**ask(16, use_cache=False), "token_type_ids": torch.zeros(1, 20, dtype=torch.long)}
_QUERY = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))


def _colpali() -> Any:
    return package().ColPaliConfig(vlm_config=_paligemma2(), embedding_dim=16)


def _colqwen2() -> Any:
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 32, "patch_size": 14, "embed_dim": 32, "mlp_ratio": 2}
    text = {**LANGUAGE, "rope_parameters": ROTARY}
    marks = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": START}
    vlm = package().Qwen2VLConfig(vision_config=vision, text_config=text, **marks)
    return package().ColQwen2Config(vlm_config=vlm, embedding_dim=16)


def _build_colpali(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    return LateInteraction(built(name, config, attention, **ask(16)), _QUERY, torch.eye(3))


def _build_colqwen2(name: str, config: Callable[[], Any], attention: str) -> nn.Module:
    asked = kinds(4, "", framed=True)
    bound = with_inputs(
        built(name, config, attention),
        partial(by_page, PackedPatches()),
        input_ids=asked["input_ids"],
        attention_mask=asked["attention_mask"],
    )
    return LateInteraction(bound, _QUERY, torch.eye(3))


# family, class, configuration, how it is asked, side of the image
_ARCHITECTURES: tuple[tuple[str, str, Callable[[], Any], Any, int], ...] = (
    ("Qwen3.5", "Qwen3_5ForConditionalGeneration", _qwen35, _build_packed, 56),
    ("Qwen3.5, long", "Qwen3_5ForConditionalGeneration", _qwen35, _build_long, 56),
    ("Gemma 4", "Gemma4ForConditionalGeneration", gemma4, _build_gemma, 64),
    ("Gemma 3n", "Gemma3nForConditionalGeneration", _gemma3n, build_with(**ask(4, use_cache=False)), 64),
    ("Llama 4", "Llama4ForConditionalGeneration", _llama4, build_with(**ask(4, use_cache=False)), 64),
    ("Llama 3.2 Vision", "MllamaForConditionalGeneration", mllama, _build_tiles, 64),
    ("Perception LM", "PerceptionLMForConditionalGeneration", _perception, _build_crops, 64),
    (
        "PaliGemma 2",
        "PaliGemmaForConditionalGeneration",
        _paligemma2,
        build_with(**_TYPED),
        64,
    ),
    ("Donut", "VisionEncoderDecoderModel", partial(_reader, "DonutSwin", _DONUT, "MBart"), build_with(**_SPOKEN), 64),
    ("TrOCR", "VisionEncoderDecoderModel", partial(_reader, "ViT", VIT, "TrOCR"), build_with(**_SPOKEN), 64),
    ("Pix2Struct", "Pix2StructForConditionalGeneration", _pix2struct, _build_pix2struct, 64),
    ("ColPali", "ColPaliForRetrieval", _colpali, _build_colpali, 64),
    ("ColQwen2", "ColQwen2ForRetrieval", _colqwen2, _build_colqwen2, 56),
    ("LayoutLMv3", "LayoutLMv3ForSequenceClassification", _layoutlm, build_with(**_PAGE), 64),
)


def entries() -> list[Entry]:
    """Return the entries of these models: a class, the score of a page, or else the next word is explained."""
    return [
        Entry("transformers", family, name, partial(build, name, config, "sdpa"), (side, side), score=_score(name))
        for family, name, config, build, side in _ARCHITECTURES
    ]


def _score(name: str) -> Score | None:
    if name.endswith("Retrieval"):
        return total_score
    return None if name.startswith("Layout") else ANSWER
