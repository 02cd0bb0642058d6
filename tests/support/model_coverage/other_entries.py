"""The architectures of torchvision, open_clip, bcos and MONAI, and the embedded ones, in the table of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from dave_vit.models.families import bcos, open_clip, torchvision
from dave_vit.models.families.builtin import BUILTIN
from dave_vit.models.recordings import VolumeModel
from dave_vit.models.retrieval import SimilarityClassifier
from model_coverage.entry import CLASSES, Entry

_SWIN = {"embed_dim": 24, "depths": [1, 2, 1], "num_heads": [1, 2, 4], "window_size": [4, 4]}
_TORCHVISION: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ViT", "vit_b_16", {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "image_size": 64}),
    ("Swin", "swin_t", _SWIN),
    ("Swin v2", "swin_v2_t", _SWIN),
    ("ConvNeXt", "convnext_tiny", {"dims": (16, 24, 32, 48, None)}),
    ("ResNet", "resnet18", {}),
    ("MobileNet v3", "mobilenet_v3_small", {}),
    ("EfficientNet", "efficientnet_b0", {}),
    ("RegNet", "regnet_y_400mf", {}),
    ("ShuffleNet v2", "shufflenet_v2_x0_5", {}),
)

_HALF = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 64}
_OPEN_CLIP: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("CLIP", "ViT-B-16", {"vision_cfg": _HALF}),
    ("CLIP, quick GELU", "ViT-B-16-quickgelu", {"vision_cfg": _HALF, "quick_gelu": True}),
    ("CLIP, attention pooling", "ViT with attentional_pool", {"vision_cfg": {**_HALF, "attentional_pool": True}}),
    (
        "CLIP ResNet",
        "RN50",
        {"vision_cfg": {"layers": (1, 1, 1, 1), "width": 16, "patch_size": None, "image_size": 64}},
    ),
    (
        "SigLIP",
        "ViT-B-16-SigLIP",  # timm's test_vit3 is its image half in small
        {
            "vision_cfg": {"timm_model_name": "test_vit3", "timm_pool": "map", "image_size": 160},
            "init_logit_bias": -10.0,
        },
    ),
    (
        "ConvNeXt CLIP",
        "convnext_base",
        {"vision_cfg": {"timm_model_name": "convnext_atto", "timm_pool": "", "timm_proj": "linear", "image_size": 64}},
    ),
)

_BCOS: tuple[tuple[str, str, int], ...] = (
    ("B-cos SimpleViT", "simple_vit_ti_patch16_224", 6),
    ("B-cos ViT-C, conv stem", "vitc_ti_patch1_14", 6),
    ("SimpleViT", "standard_simple_vit_ti_patch16_224", 3),
    ("ViT-C, conv stem", "standard_vitc_ti_patch1_14", 3),
    ("B-cos ResNet", "resnet18", 6),
    ("B-cos DenseNet", "densenet121", 6),
)


_SMALL_3D = {"img_size": (16,) * 3, "hidden_size": 32, "mlp_dim": 64, "num_heads": 2}
# family, name, its values
_MONAI: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "3-D ViT",
        "ViT",
        {
            **_SMALL_3D,
            "patch_size": (8,) * 3,
            "num_layers": 2,
            "classification": True,
            "num_classes": CLASSES,
            "post_activation": "",
        },
    ),
    ("UNETR", "UNETR", {**_SMALL_3D, "out_channels": CLASSES, "feature_size": 4}),
)
_SWIN_UNETR = {"out_channels": CLASSES, "feature_size": 12, "depths": (1,) * 4, "num_heads": (1, 1, 2, 2)}


def _monai(name: str, values: dict[str, Any]) -> nn.Module:
    from monai.networks import nets

    return VolumeModel(getattr(nets, name)(in_channels=1, **values), values.get("img_size", (32, 64, 32)), [])


def _torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    if not options:
        return torchvision.build(name, num_classes=CLASSES)
    model: nn.Module = _SMALL[name](**options)
    return model


def _small_vit(**options: Any) -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(patch_size=16, num_classes=CLASSES, **options)


def _small_swin(**options: Any) -> Any:
    from torchvision.models import SwinTransformer

    return SwinTransformer(patch_size=[4, 4], num_classes=CLASSES, **options)


def _small_swin_v2(**options: Any) -> Any:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    return _small_swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2, **options)


def _small_convnext(dims: tuple[int | None, ...]) -> Any:
    """With one block in each stage."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(*pair, 1) for pair in pairwise(dims)], num_classes=CLASSES)


_SMALL: dict[str, Callable[..., Any]] = {
    "vit_b_16": _small_vit,
    "swin_t": _small_swin,
    "swin_v2_t": _small_swin_v2,
    "convnext_tiny": _small_convnext,
}


def _open_clip(options: dict[str, Any]) -> nn.Module:
    text = {"context_length": 8, "vocab_size": 64, "layers": 1, "width": 32, "heads": 2}
    model = open_clip.import_open_clip().CLIP(**{"embed_dim": 32, "text_cfg": text, **options}).eval()
    with torch.no_grad():
        features = model.encode_text(torch.randint(1, 64, (CLASSES, 8), generator=torch.Generator().manual_seed(0)))
    return SimilarityClassifier(
        model, open_clip.encode_image, features, scale=model.logit_scale.exp(), bias=model.logit_bias
    )


def entries() -> list[Entry]:
    """What is checked of torchvision, open_clip, bcos, MONAI, and of the embedded models."""
    return [
        *(Entry("torchvision", family, name, partial(_torchvision, name, more)) for family, name, more in _TORCHVISION),
        *(
            Entry("open_clip", family, name, partial(_open_clip, options), (options["vision_cfg"]["image_size"],) * 2)
            for family, name, options in _OPEN_CLIP
        ),
        *(
            Entry("bcos", family, name, partial(bcos.build, name, num_classes=CLASSES), channels=channels)
            for family, name, channels in _BCOS
        ),
        *(
            Entry("monai", family, name, partial(_monai, name, more), (16, 16), channels=1, frames=16)
            for family, name, more in _MONAI
        ),
        Entry(  # halved five times, and normalised by the last two numbers of each channel
            "monai", "Swin UNETR", "SwinUNETR", partial(_monai, "SwinUNETR", _SWIN_UNETR), (64, 32), 1, frames=32
        ),
        Entry("builtin", "ViT", "builtin", BUILTIN["builtin"].create, (224, 224)),
        Entry("builtin", "B-cos ViT", "builtin-bcos", BUILTIN["builtin-bcos"].create, (224, 224), 6),
    ]
