"""Detectors and segmentation models of transformers in which a factor is frozen, in the table of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dave_vit.engine.scores import Query
from dave_vit.models.checkpoint import import_transformers as package
from model_coverage.entry import Entry
from model_coverage.hf_entries import PLAIN, VIT
from model_coverage.hf_tasks import (
    DETR,
    LABELS,
    OWN_BACKBONE,
    STAGES,
    SWIN,
    backbone,
    class_of_query,
    entry,
    first_mask,
    mask_of_query,
    maskformer,
)

_WORDS = {"vocab_size": 200, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SENTENCE = {"input_ids": torch.tensor([[1, 5, 6, 2]])}
_POINT = {"input_points": torch.tensor([[[[20.0, 30.0]]]]), "input_labels": torch.tensor([[[1]]])}


def _rf_detr() -> Any:
    body = package().RfDetrDinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_windows=2,
        patch_size=8,
        image_size=64,
        out_features=["stage1", "stage2"],
    )
    heads = {"decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2, "decoder_ffn_dim": 64}
    sizes = {"d_model": 32, "decoder_layers": 2, "num_queries": 5, "group_detr": 1, "decoder_n_points": 2}
    return package().RfDetrConfig(backbone_config=body, num_labels=LABELS, **heads, **sizes)


def _d_fine() -> Any:
    stages = {
        "stage_in_channels": [16, 16, 24, 32],
        "stage_mid_channels": [16] * 4,
        "stage_out_channels": [16, 24, 32, 48],
        "stage_num_blocks": [1] * 4,
        "stage_downsample": [False, True, True, True],
        "stage_light_block": [False] * 4,
        "stage_kernel_size": [3] * 4,
        "stage_numb_of_layers": [2] * 4,
        "stem_channels": [3, 16, 16],
        "embedding_size": 16,
        "hidden_sizes": [16, 24, 32, 48],
        "depths": [1] * 4,
    }
    body = package().HGNetV2Config(**stages, out_features=STAGES[1:])
    encoder = {"encoder_hidden_dim": 32, "encoder_in_channels": [24, 32, 48], "decoder_in_channels": [32] * 3}
    sizes = {"num_denoising": 0, "max_num_bins": 8, "lqe_hidden_dim": 16}
    return package().DFineConfig(num_labels=LABELS, backbone_config=body, **{**DETR, **encoder, **sizes})


def _owl(name: str) -> Any:
    halves = {"text_config": {**PLAIN, **_WORDS}, "vision_config": VIT}
    return getattr(package(), f"{name}Config")(**halves, projection_dim=32)


def _oneformer() -> Any:
    sizes = {"conv_dim": 32, "mask_dim": 32, "hidden_dim": 32, "dim_feedforward": 64, "encoder_feedforward_dim": 64}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "query_dec_layers": 1, "num_attention_heads": 2}
    text = {"task_seq_len": 4, "text_encoder_context_length": 4, "text_encoder_width": 32}
    values = {**sizes, **layers, **text, **OWN_BACKBONE, "num_queries": 5, "num_labels": LABELS}
    return package().OneFormerConfig(backbone_config=backbone("Swin", STAGES, SWIN), **values)


def _eomt() -> Any:
    sizes = {**PLAIN, "image_size": 64, "patch_size": 16, "num_blocks": 1, "num_upscale_blocks": 1, "num_queries": 5}
    return package().EomtConfig(**sizes, num_labels=LABELS)


def _sam2() -> Any:
    body = {
        "hidden_size": 16,
        "image_size": [64, 64],
        "blocks_per_stage": [1] * 4,
        "embed_dim_per_stage": [16, 24, 32, 48],
        "num_attention_heads_per_stage": [1, 2, 2, 2],
        "window_size_per_stage": [4, 4, 4, 4],
        "global_attention_blocks": [],
        "window_positional_embedding_background_size": [4, 4],
    }
    body = package().Sam2HieraDetConfig(**body)
    vision = package().Sam2VisionConfig(
        backbone_config=body,
        backbone_channel_list=[48, 32, 24, 16],
        fpn_hidden_size=32,
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
    )
    prompt = {"hidden_size": 32, "image_size": 64, "mask_input_channels": 4}
    decoder = {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    return package().Sam2Config(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)


def _sam3() -> Any:
    body = package().Sam3ViTConfig(**VIT, window_size=2, global_attn_indexes=[1], pretrain_image_size=64)
    vision = {"backbone_config": body, "fpn_hidden_size": 32, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
    layers = {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    text = package().CLIPTextConfig(**PLAIN, **_WORDS, projection_dim=32)
    return package().Sam3Config(
        vision_config=package().Sam3VisionConfig(**vision),
        text_config=text,
        geometry_encoder_config=layers,
        detr_encoder_config=layers,
        detr_decoder_config={**layers, "num_layers": 2, "num_queries": 5},
        mask_decoder_config={"hidden_size": 32, "num_attention_heads": 2},
    )


def _mask_of_object(output: Any) -> torch.Tensor:
    masks: torch.Tensor = output.pred_masks[:, 2].mean((1, 2))
    return masks


def _logit_of_object(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output.pred_logits[:, 2]
    return logits


_CLASS = {"score": class_of_query}
_MASK = {"score": mask_of_query}
_TASK = {"task_inputs": torch.tensor([[1, 5, 6, 2]])}
# family, class, configuration, what else an entry has
_ARCHITECTURES: tuple[tuple[str, str, Callable[[], Any], dict[str, Any]], ...] = (
    ("RF-DETR", "RfDetrForObjectDetection", _rf_detr, {}),
    ("D-FINE", "DFineForObjectDetection", _d_fine, {}),
    ("OWL-ViT", "OwlViTForObjectDetection", partial(_owl, "OwlViT"), {"score": Query(2, 0), "constants": _SENTENCE}),
    ("OWLv2", "Owlv2ForObjectDetection", partial(_owl, "Owlv2"), {"score": Query(2, 0), "constants": _SENTENCE}),
    ("MaskFormer, mask", "MaskFormerForInstanceSegmentation", maskformer, _MASK),
    (
        "OneFormer, class",
        "OneFormerForUniversalSegmentation",
        _oneformer,
        {"score": class_of_query, "constants": _TASK},
    ),
    ("OneFormer, mask", "OneFormerForUniversalSegmentation", _oneformer, {**_MASK, "constants": _TASK}),
    ("EoMT, class", "EomtForUniversalSegmentation", _eomt, _CLASS),
    ("EoMT, mask", "EomtForUniversalSegmentation", _eomt, _MASK),
    ("SAM 2 with a point", "Sam2Model", _sam2, {"score": first_mask, "constants": _POINT}),
    ("SAM 3 with a text, object", "Sam3Model", _sam3, {"score": _logit_of_object, "constants": _SENTENCE}),
    ("SAM 3 with a text, mask", "Sam3Model", _sam3, {"score": _mask_of_object, "constants": _SENTENCE}),
)


def entries() -> list[Entry]:
    """What is checked of these models."""
    return [entry(*task) for task in _ARCHITECTURES]
