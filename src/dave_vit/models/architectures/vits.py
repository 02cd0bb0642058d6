"""Vision Transformers of the embedded models, module for module and name for name as those of their libraries.

`PlainViT` is timm's VisionTransformer of the same size, reimplemented because importing timm takes seconds; `BcosViT`
is the SimpleViT of the ``bcos`` package (Böhle et al., 2024), without biases, so that it needs no extra. Weights of
both libraries load unchanged.
"""

import math
from collections import OrderedDict

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


class BcosBlock(nn.Module):
    """A transformer block."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attn = BcosAttention(dim, heads)
        linear1, linear2 = BcosLinear(dim, hidden), BcosLinear(hidden, dim)  # no activation: B-cos is not linear
        net = nn.Sequential(OrderedDict(norm=CentredNorm(dim), linear1=linear1, linear2=linear2))
        self.ff = nn.Sequential(OrderedDict(net=net))

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
