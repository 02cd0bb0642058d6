"""Detectors, segmentation, depth and video models of transformers in the table of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.scores import Query, Region, Value
from dave_vit.models.checkpoint import import_transformers as package
from dave_vit.models.frozen_factors import freeze_factors
from dave_vit.models.inputs import with_inputs
from dave_vit.models.recordings import AudioModel
from model_coverage.entry import Entry
from model_coverage.hf_entries import PLAIN, VIT

LABELS = 7
_FRAMES = 4
_RESNET = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48], "embedding_size": 16}
SWIN = {"image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "window_size": 4}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
OWN_BACKBONE = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
DETR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 5, **_HEADS}
_VIDEO = {"num_frames": _FRAMES, "image_size": 64}
_JEPA = {"crop_size": 64, "frames_per_clip": _FRAMES, "hidden_size": 32, "num_attention_heads": 2}
_JEPA |= {"num_hidden_layers": 2, "num_pooler_layers": 1, "mlp_ratio": 2}
_JEPA |= {"pred_hidden_size": 32, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
_SOUND = {**PLAIN, "max_length": 64, "num_mel_bins": 32, "num_labels": LABELS}
_DEEP = {**VIT, "num_hidden_layers": 4}
_FUSED = {"neck_hidden_sizes": [16] * 4, "fusion_hidden_size": 16}
_QUARTER = (0.0, 0.0, 0.5, 0.5)
_PROMPT = torch.tensor([[101, 5, 6, 102]])


def class_of_query(output: Any) -> Tensor:
    logits: Tensor = output.class_queries_logits[:, 2, 3]
    return logits


def mask_of_query(output: Any) -> Tensor:
    masks: Tensor = output.masks_queries_logits[:, 2].mean((1, 2))
    return masks


def first_mask(output: Any) -> Tensor:
    masks: Tensor = output.pred_masks[:, 0, 0].mean((1, 2))
    return masks


def backbone(name: str, stages: list[str], values: dict[str, Any]) -> Any:
    return getattr(package(), f"{name}Config")(**values, out_features=stages)


def _detr(name: str, stages: list[str], **more: Any) -> Any:
    values = {**DETR, **OWN_BACKBONE, **more, "backbone_config": backbone("ResNet", stages, _RESNET)}
    return getattr(package(), f"{name}Config")(num_labels=LABELS, **values)


def _rt_detr(name: str) -> Any:
    encoder = {"encoder_hidden_dim": 32, "encoder_in_channels": [24, 32, 48], "decoder_in_channels": [32] * 3}
    values = {**DETR, **encoder, "num_denoising": 0}
    body = backbone("RTDetrResNet", STAGES[1:], {**_RESNET, "layer_type": "basic"})
    return getattr(package(), f"{name}Config")(num_labels=LABELS, backbone_config=body, **values)


def _grounding_dino() -> Any:
    text = package().BertConfig(**PLAIN, vocab_size=200, max_position_embeddings=32)
    body = backbone("Swin", STAGES[1:], SWIN)
    values = {**DETR, **OWN_BACKBONE, "max_text_len": 8, "num_feature_levels": 3}
    return package().GroundingDinoConfig(backbone_config=body, text_config=text, **values)


def _mask2former() -> Any:
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "dim_feedforward": 64, "num_queries": 5}
    layers = {"encoder_feedforward_dim": 64, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2}
    values = {**sizes, **layers, **OWN_BACKBONE, "num_labels": LABELS}
    return package().Mask2FormerConfig(backbone_config=backbone("Swin", STAGES, SWIN), **values)


def maskformer() -> Any:
    decoder = package().DetrConfig(backbone_config=None, use_timm_backbone=False, **DETR)
    body = backbone("Swin", STAGES, SWIN)
    sizes = {"fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": LABELS}
    return package().MaskFormerConfig(backbone_config=body, decoder_config=decoder, **sizes)


def _upernet() -> Any:
    body = backbone("ConvNext", STAGES, {key: _RESNET[key] for key in ("depths", "hidden_sizes")})
    sizes = {"hidden_size": 32, "auxiliary_in_channels": 32, "auxiliary_channels": 16, "pool_scales": [1, 2]}
    return package().UperNetConfig(backbone_config=body, num_labels=LABELS, **sizes, **OWN_BACKBONE)


def _sam() -> Any:
    windows = {"window_size": 2, "global_attn_indexes": [1], "mlp_dim": 64, "num_pos_feats": 8}
    vision = {**VIT, "output_channels": 16, **windows}
    prompt = {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
    sizes = {"mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    decoder = {"hidden_size": 16, **sizes}
    parts = {"vision_config": vision, "prompt_encoder_config": prompt, "mask_decoder_config": decoder}
    return package().SamConfig(**parts)


def _depth_anything() -> Any:
    body = backbone("Dinov2", STAGES, {**_DEEP, "patch_size": 14, "image_size": 56, "reshape_hidden_states": False})
    sizes = {"reassemble_hidden_size": 32, "patch_size": 14, "head_hidden_size": 8}
    return package().DepthAnythingConfig(backbone_config=body, **sizes, **_FUSED)


def _config(name: str, values: dict[str, Any]) -> Any:
    return getattr(package(), f"{name}Config")(**values)


def built(name: str, config: Callable[[], Any], attention: str = "sdpa", **constants: Any) -> nn.Module:
    """A model of a class of transformers, of its pixels alone; with its own attention where it has no fused one."""
    made, configured = getattr(package(), name), config()
    try:
        model: nn.Module = made._from_config(configured, attn_implementation=attention)
    except ValueError:
        model = made._from_config(configured, attn_implementation="eager")
    model = freeze_factors(model)
    return with_inputs(model, **constants) if constants else model


_POINT = {"input_points": torch.tensor([[[[20.0, 30.0]]]]), "input_labels": torch.tensor([[[1]]])}
_ASKED = {"input_ids": _PROMPT, "attention_mask": torch.ones_like(_PROMPT), "token_type_ids": torch.zeros_like(_PROMPT)}
_YOLOS = {**VIT, "image_size": [64, 64], "num_detection_tokens": 5, "num_labels": LABELS}
_SEGFORMER = {**{key: _RESNET[key] for key in ("depths", "hidden_sizes")}, "num_attention_heads": [1, 2, 2, 4]}
_DPT = {**_DEEP, "backbone_out_indices": [0, 1, 2, 3], **_FUSED}

# family, class, configuration, what else an entry has
_TASKS: tuple[tuple[str, str, Callable[[], Any], dict[str, Any]], ...] = (
    ("DETR", "DetrForObjectDetection", partial(_detr, "Detr", ["stage4"]), {}),
    ("DETR, eager attention", "DetrForObjectDetection", partial(_detr, "Detr", ["stage4"]), {"attention": "eager"}),
    ("Conditional DETR", "ConditionalDetrForObjectDetection", partial(_detr, "ConditionalDetr", ["stage4"]), {}),
    (
        "Deformable DETR",
        "DeformableDetrForObjectDetection",
        partial(_detr, "DeformableDetr", STAGES[1:], num_feature_levels=3),
        {},
    ),
    ("RT-DETR", "RTDetrForObjectDetection", partial(_rt_detr, "RTDetr"), {}),
    ("RT-DETR v2", "RTDetrV2ForObjectDetection", partial(_rt_detr, "RTDetrV2"), {}),
    ("YOLOS", "YolosForObjectDetection", partial(_config, "Yolos", _YOLOS), {}),
    ("YOLOS, eager attention", "YolosForObjectDetection", partial(_config, "Yolos", _YOLOS), {"attention": "eager"}),
    ("Grounding DINO", "GroundingDinoForObjectDetection", _grounding_dino, {"constants": _ASKED}),
    (
        "SegFormer, segmentation",
        "SegformerForSemanticSegmentation",
        partial(_config, "Segformer", {**_SEGFORMER, "decoder_hidden_size": 32, "num_labels": LABELS}),
        {"score": Region(3, box=_QUARTER)},
    ),
    ("UPerNet", "UperNetForSemanticSegmentation", _upernet, {"score": Region(3, box=_QUARTER)}),
    ("Mask2Former, class", "Mask2FormerForUniversalSegmentation", _mask2former, {"score": class_of_query}),
    ("Mask2Former, mask", "Mask2FormerForUniversalSegmentation", _mask2former, {"score": mask_of_query}),
    ("MaskFormer, class", "MaskFormerForInstanceSegmentation", maskformer, {"score": class_of_query}),
    ("SAM with a point", "SamModel", _sam, {"score": first_mask, "constants": _POINT}),
    (
        "SAM with a point, eager attention",
        "SamModel",
        _sam,
        {"score": first_mask, "constants": _POINT, "attention": "eager"},
    ),
    ("DPT", "DPTForDepthEstimation", partial(_config, "DPT", _DPT), {"score": Value()}),
    (
        "DPT, eager attention",
        "DPTForDepthEstimation",
        partial(_config, "DPT", _DPT),
        {"score": Value(), "attention": "eager"},
    ),
    ("Depth Anything", "DepthAnythingForDepthEstimation", _depth_anything, {"score": Value(), "size": (56, 56)}),
)
_CLIPS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("VideoMAE", "VideoMAE", {**VIT, **_VIDEO, "tubelet_size": 2}),
    ("TimeSformer", "Timesformer", {**VIT, **_VIDEO}),
    ("ViViT", "Vivit", {**PLAIN, **_VIDEO, "tubelet_size": [2, 16, 16]}),
    ("V-JEPA 2", "VJEPA2", _JEPA),
)


def _build_sound() -> nn.Module:
    model = package().ASTForAudioClassification(package().ASTConfig(**_SOUND))
    return AudioModel(model, None, [], spec="ast")


def entry(family: str, name: str, config: Callable[[], Any], more: dict[str, Any]) -> Entry:
    """One line of the table; a query's class is explained unless another score is given."""
    more = {"score": Query(2, 3), **more}
    build = partial(built, name, config, more.pop("attention", "sdpa"), **more.pop("constants", {}))
    return Entry("transformers", family, name, build, **more)


def entries() -> list[Entry]:
    """What is checked of transformers' models for other tasks than classification."""
    clips = [
        entry(
            family,
            f"{name}ForVideoClassification",
            partial(_config, name, {**values, "num_labels": LABELS}),
            {"score": None, "frames": _FRAMES},
        )
        for family, name, values in _CLIPS
    ]
    sound = Entry("transformers", "AST", "ASTForAudioClassification", _build_sound, (32, 64), channels=1)
    return [*(entry(*task) for task in _TASKS), *clips, sound]
