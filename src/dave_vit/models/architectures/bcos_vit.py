"""A B-cos Vision Transformer (Böhle et al., 2024), free of biases; parameter names are those of the ``bcos`` package.

Reimplemented so that the embedded B-cos model needs no extra; weights of the package's SimpleViT load unchanged.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Detachable(nn.Module):
    """A module whose input-dependent weights can be held constant, which makes its output linear in its input."""

    detach = False

    def set_explanation_mode(self, activate: bool = True) -> None:  # noqa: FBT001 - the package's signature
        """Hold the dynamic weights constant, or not."""
        self.detach = activate

    def _detach(self, value: Tensor) -> Tensor:
        return value.detach() if self.detach else value


class NormedLinear(nn.Linear):
    """A linear layer whose weight rows count with length one."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer."""
        return F.linear(input, self.weight / torch.linalg.vector_norm(self.weight, dim=1, keepdim=True))


class BcosLinear(Detachable):
    """Linear output times |cos(input, weight)|, that is, the B-cos transform with B = 2."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = NormedLinear(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        out: Tensor = self.linear(x)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-12
        cosine = self._detach(out).abs() / self._detach(norm)
        return cosine * out


class CentredNorm(nn.LayerNorm, Detachable):
    """A layer norm without bias; the standard deviation is its dynamic weight."""

    def __init__(self, features: int) -> None:
        super().__init__(features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer."""
        if not self.detach:
            return super().forward(input)
        variance, mean = torch.var_mean(input, dim=-1, correction=0, keepdim=True)
        return (input - mean) / (variance.detach() + self.eps).sqrt() * self.weight


class BcosAttention(Detachable):
    """Self-attention; queries and keys make up its dynamic weight."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = CentredNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = BcosLinear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, D] to their update."""
        qkv = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))  # [B, N, 3, heads, d]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, N, d] each
        mixed = F.scaled_dot_product_attention(self._detach(q), self._detach(k), v)
        return self.to_out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two B-cos layers; their non-linearity replaces the activation."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        linear1, linear2 = BcosLinear(dim, hidden), BcosLinear(hidden, dim)
        self.net = nn.Sequential(OrderedDict(norm=CentredNorm(dim), linear1=linear1, linear2=linear2))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, D] to their update."""
        return self.net(x)  # type: ignore[no-any-return]


class BcosBlock(nn.Module):
    """A transformer block."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attn = BcosAttention(dim, heads)
        self.ff = FeedForward(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, D] to tokens."""
        x = self.attn(x) + x
        return self.ff(x) + x  # type: ignore[no-any-return]


def sincos_positions(side: int, dim: int) -> Tensor:
    """Return fixed positions [side * side, dim] of a square of patches: sines and cosines of x, then of y."""
    omega = 10_000.0 ** -(torch.arange(dim // 4) / (dim // 4 - 1))
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    x, y = x.reshape(-1, 1) * omega, y.reshape(-1, 1) * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


class PatchEmbedding(nn.Module):
    """Patches [B, (H/p)(W/p), p p C] through one B-cos layer."""

    def __init__(self, patch: int, channels: int, dim: int) -> None:
        super().__init__()
        self.patch = patch
        self.linear = BcosLinear(patch * patch * channels, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] to tokens [B, N, D]."""
        x = x.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))  # [B, C, h, p, w, p]
        return self.linear(x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))  # type: ignore[no-any-return]


class BcosViT(nn.Module):
    """The B-cos SimpleViT: 6-channel input (colours and their complements), mean of tokens, constant logit bias.

    Args:
        classes: number of classes C; the logits' constant bias log(1 / (C - 1)) makes each rare by default.
    """

    def __init__(self, classes: int, *, dim: int = 192, depth: int = 12, heads: int = 3, size: int = 224) -> None:
        super().__init__()
        patch, channels = 16, 6
        self.to_patch_embedding = PatchEmbedding(patch, channels, dim)
        self.register_buffer("positions", sincos_positions(size // patch, dim), persistent=False)
        blocks = ((f"encoder_{i}", BcosBlock(dim, heads, 4 * dim)) for i in range(depth))
        self.transformer = nn.Sequential(OrderedDict(blocks))
        self.linear_head = nn.Sequential(OrderedDict(norm=CentredNorm(dim), linear=BcosLinear(dim, classes)))
        self.logit_bias = math.log(1 / (classes - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 6, H, W] to logits [B, C]."""
        x = self.to_patch_embedding(x) + self.positions
        x = self.transformer(x).mean(dim=1)
        return self.linear_head(x) + self.logit_bias  # type: ignore[no-any-return]
