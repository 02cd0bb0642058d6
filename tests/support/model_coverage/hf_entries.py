"""The architectures of transformers in the table of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.models.checkpoint import import_transformers as package
from dave_vit.models.families.hf import encode_image, text_features
from dave_vit.models.retrieval import SimilarityClassifier
from model_coverage.entry import CLASSES, Entry

PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_IMAGE = {"image_size": 64, "patch_size": 16}
VIT = {**PLAIN, **_IMAGE}
_SWIN = {"image_size": 64, "embed_dim": 16, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48]}
_PYRAMID = {**_STAGES, "num_attention_heads": [1, 2, 2, 4], "image_size": 64}
_BEIT = {**VIT, "use_relative_position_bias": True, "use_absolute_position_embeddings": True}
_TEXT = {**PLAIN, "vocab_size": 64, "max_position_embeddings": 8}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TWO_HALVES = {"vision_config": VIT, "text_config": {**_TEXT, **_TOKENS, "projection_dim": 32}}
_NAFLEX = {**TWO_HALVES, "vision_config": {**PLAIN, "num_patches": 16, "patch_size": 16}}

# family, configuration, its values
_ARCHITECTURES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ViT", "ViTConfig", VIT),
    ("ViT, eager attention", "ViTConfig", {**VIT, "attn_implementation": "eager"}),
    ("ViT-MSN", "ViTMSNConfig", VIT),
    ("I-JEPA", "IJepaConfig", VIT),
    ("DeiT", "DeiTConfig", {**VIT, "architectures": ["DeiTForImageClassification"]}),
    ("DeiT, two heads", "DeiTConfig", {**VIT, "architectures": ["DeiTForImageClassificationWithTeacher"]}),
    ("DINOv2", "Dinov2Config", VIT),
    ("DINOv2, SwiGLU", "Dinov2Config", {**VIT, "use_swiglu_ffn": True}),
    ("DINOv2, registers", "Dinov2WithRegistersConfig", VIT),
    ("BEiT", "BeitConfig", _BEIT),
    ("Data2Vec", "Data2VecVisionConfig", _BEIT),
    ("Swin", "SwinConfig", _SWIN),
    ("Swin v2", "Swinv2Config", _SWIN),
    ("CLIP", "CLIPConfig", TWO_HALVES),
    ("SigLIP", "SiglipConfig", TWO_HALVES),
    ("MetaCLIP 2", "MetaClip2Config", TWO_HALVES),
    ("Hiera", "HieraConfig", {"embed_dim": 16, "depths": [1, 1, 1, 1], "image_size": [64, 64]}),
    ("PVT", "PvtConfig", _PYRAMID),
    ("PVT v2", "PvtV2Config", _PYRAMID),
    ("SegFormer", "SegformerConfig", {**_STAGES, "num_attention_heads": [1, 2, 2, 4]}),
    ("CvT", "CvtConfig", {"embed_dim": [16, 24, 32], "num_heads": [1, 2, 2]}),
    ("PoolFormer", "PoolFormerConfig", _STAGES),
    ("ConvNeXt", "ConvNextConfig", _STAGES),
    ("ConvNeXt v2", "ConvNextV2Config", _STAGES),
    ("ResNet", "ResNetConfig", {**_STAGES, "embedding_size": 16}),
    ("MobileViT", "MobileViTConfig", {"image_size": 64}),
    ("FocalNet", "FocalNetConfig", {"image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1]}),
)
_ZERO_SHOT = (
    ("CLIP, zero-shot", "CLIPConfig"),
    ("SigLIP, zero-shot", "SiglipConfig"),
    ("MetaCLIP 2, zero-shot", "MetaClip2Config"),
    ("AIMv2, zero-shot", "Aimv2Config"),
)
# Backbones without a head: a linear layer on their pooled features makes one, as a probe does.
_BACKBONES = (
    ("DINOv3", "DINOv3ViTConfig", {**VIT, "num_register_tokens": 2}),
    ("DINOv3, gated", "DINOv3ViTConfig", {**VIT, "use_gated_mlp": True, "hidden_act": "silu"}),
    ("DINOv3 ConvNeXt", "DINOv3ConvNextConfig", _STAGES),
    ("AIMv2", "Aimv2VisionConfig", VIT),
)


def _build(config: str, values: dict[str, Any]) -> nn.Module:
    transformers = package()
    values = dict(values)
    attention = values.pop("attn_implementation", "sdpa")
    made = getattr(transformers, config)(num_labels=CLASSES, **values)
    build: Callable[..., nn.Module] = transformers.AutoModelForImageClassification.from_config
    try:
        return build(made, attn_implementation=attention)
    except ValueError:  # an architecture without fused attention
        return build(made, attn_implementation="eager")


def _build_zero_shot(config: str) -> nn.Module:
    transformers = package()
    model = transformers.AutoModel.from_config(getattr(transformers, config)(**TWO_HALVES)).eval()
    tokens = torch.tensor([[1, 5, 6, 2], [1, 7, 8, 2]])
    text = text_features(model, {"input_ids": tokens})
    return SimilarityClassifier(
        model, encode_image, text, scale=model.logit_scale.exp(), bias=getattr(model, "logit_bias", None)
    )


class _Probe(nn.Module):
    """A linear layer on the pooled features of a backbone."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(pixel_values=images).pooler_output)


def _build_probe(config: str, values: dict[str, Any]) -> nn.Module:
    made = getattr(package(), config)(**values)
    width = made.hidden_sizes[-1] if hasattr(made, "hidden_sizes") else made.hidden_size
    return _Probe(getattr(package(), config.replace("Config", "Model"))(made), width)


class _NaFlex(nn.Module):
    """Images of one size for a model that takes patches ``[B, patches, numbers]``, a mask and the shape of the grid."""

    def __init__(self, model: nn.Module, side: int = 16) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, rows, columns = len(images), 3, images.shape[2] // self.side, images.shape[3] // self.side
        grid = images.reshape(batch, channels, rows, self.side, columns, self.side)
        patches = grid.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, -1)
        shapes = torch.tensor([[rows, columns]] * batch)
        return self.model(patches, torch.ones(batch, rows * columns, dtype=torch.int64), shapes).logits


def _build_naflex() -> nn.Module:
    config = package().Siglip2Config(num_labels=CLASSES, **_NAFLEX)
    return _NaFlex(package().Siglip2ForImageClassification(config))


def entries() -> list[Entry]:
    """What is checked of transformers."""
    classifiers = [
        Entry("transformers", family, config.removesuffix("Config"), partial(_build, config, values))
        for family, config, values in _ARCHITECTURES
    ]
    zero_shot = [
        Entry("transformers", family, config.removesuffix("Config"), partial(_build_zero_shot, config))
        for family, config in _ZERO_SHOT
    ]
    probes = [
        Entry("transformers", family, config.replace("Config", "Model"), partial(_build_probe, config, values))
        for family, config, values in _BACKBONES
    ]
    naflex = Entry("transformers", "SigLIP 2, NaFlex", "Siglip2", _build_naflex)
    return [*classifiers, *zero_shot, *probes, naflex]
