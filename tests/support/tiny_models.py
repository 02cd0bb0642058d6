"""Small models of several families with weights drawn at random, large enough for every path to count."""

from __future__ import annotations

import torch
from torch import nn

SIZE, CLASSES = 32, 5


def drawn(model: nn.Module, std: float = 0.2) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.normal_(0, std, generator=generator)
    return model.eval()


def vit(**options) -> nn.Module:
    import timm

    shape = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": CLASSES}
    return drawn(timm.models.VisionTransformer(**shape | options))


def swin() -> nn.Module:
    import timm

    shape = {"img_size": SIZE, "patch_size": 4, "window_size": 4, "embed_dim": 12, "depths": (2, 2)}
    return drawn(timm.models.SwinTransformer(num_heads=(2, 2), num_classes=CLASSES, **shape))


def torchvision_vit() -> nn.Module:
    """Attention is one composite function here, and tokens come sequence first."""
    from torchvision.models import VisionTransformer

    return drawn(VisionTransformer(SIZE, 8, 2, 3, 24, 48, num_classes=CLASSES))


def huggingface_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = ViTConfig(image_size=SIZE, patch_size=8, num_labels=CLASSES, **shape)
    return drawn(ViTForImageClassification(config))


def relu_cnn() -> nn.Module:
    start = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    end = [nn.Conv2d(6, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)]
    model = drawn(nn.Sequential(*start, *end), std=0.4)
    with torch.no_grad():
        model[1].running_mean.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
        model[1].running_var.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(2))
    return model


HIDING = {  # options of methods that hide parts of the image, for few passes
    "occlusion": {"window": 16, "stride": 16},
    "rise": {"samples": 3, "cells": 2},
    "lime": {"samples": 3, "patch": 16},
    "kernel_shap": {"samples": 3, "patch": 16},
    "vit_cx": {"distance": 0.0},
    "tis": {"samples": 3},
    "greedy": {"patch": 16, "rounds": 2},
    "mda": {"patch": 16},
}
FEW = {  # few samples and steps, so that the suite is quick
    "dave": {"samples": 3},
    "equivariant": {"samples": 3},
    "integrated_gradients": {"steps": 4},
    "smoothgrad": {"samples": 3},
    "iia": {"steps": 2},
    "beyond_intuition": {"steps": 2},
    "expected_gradients": {"samples": 3},
    **HIDING,
}
OF_THE_LOGIT = {  # options with which a class is explained by its logit, as a function of the logits can say it
    "dave": {"preset": "paper"},
    "finercam": {"strength": 0.0},
    **{name: {"score": "logit"} for name in HIDING},
}
FAMILIES = {"vit": vit, "swin": swin, "torchvision": torchvision_vit, "cnn": relu_cnn}


def images(count: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(7)).to(dtype)


class CountingConv(nn.Module):
    """One convolution and a head for five classes, which counts the images that it is run on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.images = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.images += len(x)
        return 3 * self.head(self.stem(x).relu().mean((2, 3)))
