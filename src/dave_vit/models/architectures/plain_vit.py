"""A plain Vision Transformer, module for module and name for name as timm's VisionTransformer of the same size.

Reimplemented because importing timm takes seconds, and the embedded model should load at once; weights are compatible.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.errors import InputError

_EPS = 1e-6  # of the layer norms, as in timm


class PatchEmbed(nn.Module):
    """Images [B, 3, H, W] to tokens [B, N, D], one for each patch."""

    def __init__(self, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """Cut and project."""
        return self.proj(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, D] to their update."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [B, N, 3, heads, d]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, N, d] each
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, D] to their update."""
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=_EPS)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=_EPS)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, D] to tokens."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class PlainViT(nn.Module):
    """Class token, learned positions, pre-norm blocks; the head reads the class token.

    Args:
        classes: number of logits.
    """

    def __init__(
        self, classes: int, *, dim: int = 192, depth: int = 12, heads: int = 3, size: int = 224, patch: int = 16
    ) -> None:
        super().__init__()
        self.size = size
        self.patch_embed = PatchEmbed(patch, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self.head = nn.Linear(dim, classes)
        self.apply(_initialise)
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W] to logits [B, classes]."""
        if x.shape[-2:] != (self.size, self.size):
            size = f"{x.shape[-2]}x{x.shape[-1]}"
            raise InputError(f"pictures of {size}; this model takes {self.size}x{self.size}: resize them first")
        x = self.patch_embed(x)  # [B, N, D]
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed  # [B, 1 + N, D]
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    # timm cuts the normal off at 100 standard deviations, which is no cut at all
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
