"""timm's architectures in the table of models."""

from __future__ import annotations

from functools import partial
from itertools import groupby, islice
from typing import Any

from torch import nn

from model_coverage.entry import CLASSES, Entry

_PLAIN = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 2}
_PATCH14 = {**_PLAIN, "img_size": 56}
_SIZE = {"img_size": 64}
_SWIN = {"img_size": 64, "embed_dim": 24, "depths": (1, 2, 1), "num_heads": (1, 2, 4), "window_size": 4}
_STAGES = {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)}
_PYRAMID = {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4)}
_TINY = {"depths": (1, 1, 2, 1), "embed_dims": (24, 32, 48, 64), "num_heads": (1, 2, 3, 4)}
_GLOBAL_SAM = {**_PLAIN, "window_size": 2, "global_attn_indexes": (1,)}

# family, name, what makes it small, side of the images
_ARCHITECTURES: tuple[tuple[str, str, dict[str, Any], int], ...] = (
    ("ViT", "vit_base_patch16_224", _PLAIN, 64),
    ("ViT", "vit_base_patch16_rpn_224", _PLAIN, 64),
    ("ViT", "vit_medium_patch16_gap_256", _PLAIN, 64),
    ("ViT", "vit_little_patch16_reg4_gap_256", _PLAIN, 64),
    ("ViT", "vit_so150m2_patch16_reg1_gap_256", _PLAIN, 64),
    ("ViT, parallel blocks", "vit_small_patch16_18x2_224", _PLAIN, 64),
    ("ViT, relative positions", "vit_relpos_small_patch16_224", _PLAIN, 64),
    ("ViT, relative positions", "vit_srelpos_small_patch16_224", _PLAIN, 64),
    ("ViT hybrid", "vit_tiny_r_s16_p8_224", _PLAIN, 64),
    ("NaFlexViT", "naflexvit_base_patch16_gap", {"embed_dim": 48, "depth": 2, "num_heads": 2}, 64),
    ("DeiT", "deit_tiny_patch16_224", _PLAIN, 64),
    ("DeiT, distilled", "deit_tiny_distilled_patch16_224", _PLAIN, 64),
    ("DeiT-III", "deit3_base_patch16_224", _PLAIN, 64),
    ("DINO", "vit_base_patch16_224.dino", _PLAIN, 64),
    ("DINOv2", "vit_small_patch14_dinov2", _PATCH14, 56),
    ("DINOv2, registers", "vit_small_patch14_reg4_dinov2", _PATCH14, 56),
    ("DINOv2, SwiGLU", "vit_giant_patch14_dinov2", _PATCH14, 56),
    ("DINOv3", "vit_small_patch16_dinov3", _PLAIN, 64),
    ("DINOv3, SwiGLU", "vit_huge_plus_patch16_dinov3", _PLAIN, 64),
    ("BEiT", "beit_base_patch16_224", _PLAIN, 64),
    ("BEiT v2", "beitv2_base_patch16_224", _PLAIN, 64),
    ("EVA", "eva_large_patch14_196", _PATCH14, 56),
    ("EVA-02", "eva02_tiny_patch14_224", _PATCH14, 56),
    ("EVA-02 CLIP", "eva02_base_patch16_clip_224", _PLAIN, 64),
    ("ViT with rotary positions", "vit_small_patch16_rope_224", _PLAIN, 64),
    ("Perception Encoder", "vit_pe_core_tiny_patch16_384", _PLAIN, 64),
    ("SigLIP", "vit_base_patch16_siglip_224", _PLAIN, 64),
    ("SigLIP", "vit_base_patch16_siglip_gap_224", _PLAIN, 64),
    ("SigLIP 2", "vit_base_patch16_siglip_224.v2_webli", _PLAIN, 64),
    ("CLIP", "vit_base_patch16_clip_224", _PLAIN, 64),
    ("CLIP, quick GELU", "vit_base_patch16_clip_quickgelu_224", _PLAIN, 64),
    ("AIMv2", "aimv2_large_patch14_224", _PATCH14, 56),
    ("SAM ViT", "samvit_base_patch16_224", _GLOBAL_SAM, 64),
    ("CaiT", "cait_xxs24_224", _PLAIN, 64),
    ("XCiT", "xcit_nano_12_p16_224", _PLAIN, 64),
    ("Swin", "swin_tiny_patch4_window7_224", _SWIN, 64),
    ("Swin v2", "swinv2_tiny_window8_256", _SWIN, 64),
    ("Swin v2 CR", "swinv2_cr_tiny_224", {**_SWIN, "window_size": None}, 64),
    ("VOLO", "volo_d1_224", _SIZE, 64),
    ("MLP-Mixer", "mixer_s16_224", _SIZE, 64),
    ("ResMLP", "resmlp_12_224", _SIZE, 64),
    ("gMLP", "gmlp_ti16_224", _SIZE, 64),
    ("ConViT", "convit_tiny", {**_PLAIN, "local_up_to_layer": 1, "embed_dim": 24}, 64),
    ("PiT", "pit_ti_224", {"img_size": 64, "depth": (1, 1, 1)}, 64),
    ("TNT", "tnt_s_patch16_224", {"img_size": 64, "depth": 2}, 64),
    ("Twins-SVT", "twins_svt_small", {"img_size": 64, **_PYRAMID, "depths": (1, 1, 2, 1)}, 64),
    ("Twins-PCPVT", "twins_pcpvt_small", {"img_size": 64, **_PYRAMID}, 64),
    ("PVT v2", "pvt_v2_b0", _PYRAMID, 64),
    ("DaViT", "davit_tiny", _PYRAMID, 64),
    ("MViT v2", "mvitv2_tiny", _SIZE, 64),
    ("Hiera", "hiera_tiny_224", {"embed_dim": 24, "stages": (1, 1, 2, 1)}, 224),
    ("GC ViT", "gcvit_xxtiny", {"img_size": 64, "window_size": (2, 2, 2, 2), "embed_dim": 16}, 64),
    ("Nest", "nest_tiny", _SIZE, 64),
    ("MaxViT", "maxvit_pico_rw_256", {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 32, 64)}, 64),
    ("CoAtNet", "coatnet_pico_rw_224", {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (16, 32, 32, 64)}, 64),
    ("LeViT", "levit_128s", {"depth": (1, 1, 2), "embed_dim": (32, 48, 64), "num_heads": (2, 3, 4)}, 224),
    ("TinyViT", "tiny_vit_5m_224", _TINY, 64),
    ("EdgeNeXt", "edgenext_xx_small", {"depths": (1, 2, 2, 2), "dims": (16, 24, 32, 48)}, 64),
    ("MobileViT", "mobilevit_xxs", {}, 64),
    ("FastViT", "fastvit_t8", {"layers": (1, 1, 1, 1)}, 64),
    ("RepViT", "repvit_m0_9", {"embed_dim": (16, 32, 48, 64), "depth": (1, 1, 2, 1)}, 64),
    ("Visformer", "visformer_tiny", {"img_size": 64, "embed_dim": 96, "depth": (2, 1, 2)}, 64),
    ("PoolFormer", "poolformer_s12", {}, 64),
    ("PoolFormer v2", "poolformerv2_s12", {}, 64),
    ("CAFormer", "caformer_s18", {}, 64),
    ("ConvNeXt", "convnext_atto", _STAGES, 64),
    ("ConvNeXt v2", "convnextv2_atto", _STAGES, 64),
    ("ResNet", "resnet18", {"channels": (16, 24, 32, 48)}, 64),
    ("ResNet", "resnet26d", {"channels": (16, 24, 32, 48)}, 64),
    ("SE-ResNet", "seresnet18", {"channels": (16, 24, 32, 48)}, 64),
    ("ResNet v2", "resnetv2_18", {"channels": (16, 24, 32, 48)}, 64),
    ("RegNet", "regnety_002", {}, 64),
    ("EfficientNet", "efficientnet_lite0", {}, 64),
    ("MobileNet v3", "mobilenetv3_small_050", {}, 64),
    ("DenseNet", "densenet121", {"block_config": (1, 1, 1, 1)}, 64),
    ("CoaT", "coat_lite_tiny", _SIZE, 64),
    ("FocalNet", "focalnet_tiny_srf", {}, 64),
    ("EfficientViM", "efficientvim_m1", {"depths": (1, 1, 1)}, 64),
    ("iFormer", "iformer_t", {}, 64),
    ("MobileViT v2", "mobilevitv2_050", {}, 64),
    ("Sequencer", "sequencer2d_s", {"layers": (1, 1, 1, 1)}, 64),
)


def find_options(name: str) -> tuple[dict[str, Any], int]:
    """Return what makes a model of the table small, and the side of its images."""
    return next((options, side) for _, known, options, side in _ARCHITECTURES if known == name)


def build(name: str, options: dict[str, Any], repeats: int = 2) -> nn.Module:
    """Return a model of timm with these options, few classes and at most ``repeats`` equal blocks in a row."""
    import timm

    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
    _shorten(model, repeats)
    return model


def _shorten(model: nn.Module, repeats: int) -> None:
    """Leave the first of equal blocks in a row, for names whose depth timm does not let one choose."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Sequential and any(True for _ in child.parameters()):
                kept = [block for _, run in groupby(child, _form) for block in islice(run, repeats)]
                setattr(module, name, nn.Sequential(*kept) if len(kept) < len(child) else child)


def _form(block: nn.Module) -> tuple[object, ...]:
    return (type(block), *(parameter.shape for parameter in block.parameters()))


def entries() -> list[Entry]:
    """What is checked of timm."""
    return [
        Entry("timm", family, name, partial(build, name, options), (side, side))
        for family, name, options, side in _ARCHITECTURES
    ]
