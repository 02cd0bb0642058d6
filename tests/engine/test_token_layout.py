"""Where tokens lie: grid and prefix, found by watching a forward pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dave_vit.engine.observation import TokenLayout, find_token_layout
from dave_vit.errors import InputError, OutputError

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}


def timm_model(name: str, **options) -> nn.Module:
    import timm

    return timm.create_model(name, **options).eval()


@pytest.mark.parametrize(
    ("name", "options", "size", "grid", "prefix"),
    [
        ("vit_tiny_patch16_224", {"img_size": 64}, (64, 64), (4, 4), 1),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True}, (64, 96), (4, 6), 1),
        ("vit_tiny_patch16_224", {"img_size": (96, 32)}, (96, 32), (6, 2), 1),
        ("deit_tiny_distilled_patch16_224", {"img_size": 64}, (64, 64), (4, 4), 2),
        ("vit_small_patch14_reg4_dinov2", {"img_size": (42, 70)}, (42, 70), (3, 5), 5),
        ("vit_small_patch16_dinov3", {}, (64, 48), (4, 3), 5),
        ("vit_base_patch16_siglip_224", {"img_size": 64}, (64, 64), (4, 4), 0),
        ("beit_base_patch16_224", {"img_size": 64}, (64, 64), (4, 4), 1),
        ("vit_tiny_r_s16_p8_224", {"img_size": 64}, (64, 64), (2, 2), 1),
    ],
)
def test_timm(name, options, size, grid, prefix):
    layout = find_token_layout(timm_model(name, **SMALL, **options), torch.randn(2, 3, *size))
    assert layout == TokenLayout(grid, prefix)


def test_torchvision():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(64, 16, 2, 2, 24, 48, num_classes=3).eval()
    assert find_token_layout(model, torch.randn(1, 3, 64, 64)) == TokenLayout((4, 4), 1)


class Reshaping(nn.Module):
    """Cuts patches without a convolution, and puts tokens before them."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix, self.embed = prefix, nn.Linear(3 * 64, 8)

    def forward(self, images):
        patches = F.unfold(images, 8, stride=8).transpose(1, 2)
        tokens = F.pad(self.embed(patches), (0, 0, self.prefix, 0), value=0.5)
        mixed = F.scaled_dot_product_attention(query=tokens, key=tokens, value=tokens)
        return mixed.mean(1)


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_patches_cut_by_reshaping(prefix):
    assert find_token_layout(Reshaping(prefix), torch.randn(1, 3, 48, 64)) == TokenLayout((6, 8), prefix)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "embed_dim": 12, "window_size": 4}, "no single token grid"),
        ("cait_xxs24_224", {"img_size": 64}, "class attention"),
        ("volo_d1_224", {"img_size": 64}, "no single token grid"),
        ("xcit_nano_12_p16_224", {"img_size": 224, **SMALL}, "no single token grid"),
        ("resnet18", {}, "no self-attention"),
        ("mixer_s32_224", {}, "no self-attention"),
    ],
)
def test_models_without_one(name, options, why):
    size = options.get("img_size", 224 if name.startswith("mixer") else 64)
    with pytest.raises(OutputError, match=why):
        find_token_layout(timm_model(name, **options), torch.randn(1, 3, size, size))


def test_values_of_tokens_as_a_picture():
    layout = TokenLayout((2, 3), 2)
    grid = layout.to_grid(torch.arange(16.0).reshape(2, 8))
    assert torch.equal(grid[0], torch.tensor([[2.0, 3, 4], [5, 6, 7]]))
    with pytest.raises(InputError, match="7 values for 8 tokens"):
        layout.to_grid(torch.zeros(7))


def test_nothing_stays_on_the_model():
    model = timm_model("vit_tiny_patch16_224", img_size=64, **SMALL)
    before = set(vars(model)), len(model._forward_hooks)
    find_token_layout(model, torch.randn(1, 3, 64, 64))
    assert (set(vars(model)), len(model._forward_hooks)) == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
