"""Fused attention with all of its arguments, and the modules of torch that hold it."""

from __future__ import annotations

import math
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from module_pairs.base import (
    HEADS,
    TOKENS,
    WIDTH,
    Pair,
    block,
    centre,
    gate,
    heads,
    linear,
    merge,
)

N = TOKENS


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """The values mixed by a held matrix."""
    scores = (q * scale) @ k.transpose(-2, -1)
    return (scores if bias is None else scores + bias).softmax(-1).detach() @ v


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)


def draw_mask(random: Random) -> Tensor:
    """Each query may attend to itself and to some others."""
    mask = torch.tensor([[random.random() < 0.6 for _ in range(N)] for _ in range(N)])
    return mask | torch.eye(N, dtype=torch.bool)


@block("sdpa")
class FusedAttention(Pair):
    """``scaled_dot_product_attention`` with every argument, by position and by name."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.packing = random.choice(["unbind", "chunk", "split", "apart", "index"])
        self.spelling = random.choice(["position", "names", "mixed", "alias", "values first"])
        self.mask = random.choice(["none", "bool", "float", "bool 4d", "float batch", "causal", "of the image"])
        self.scale = random.choice([None, 0.3, 1.0])
        self.dropout = random.choice([None, 0.0])
        self.gqa = random.random() < 0.3
        self.shared = 1 if self.gqa else HEADS  # heads of keys and values
        size = WIDTH // HEADS
        self.q = linear(random)
        self.k, self.v = (linear(random, WIDTH, self.shared * size) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=random.random() < 0.5)
        self.out = linear(random)
        allowed = draw_mask(random)
        self.register_buffer("allowed", allowed)
        self.register_buffer(
            "bias", additive(allowed) if random.random() < 0.5 else torch.linspace(-1, 1, N * N).view(N, N).double()
        )

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.gqa or self.packing == "apart":
            return heads(self.q(x)), heads(self.k(x), self.shared), heads(self.v(x), self.shared)
        packed = self.qkv(x)
        if self.packing == "chunk":
            return tuple(heads(part) for part in packed.chunk(3, dim=-1))
        if self.packing == "split":
            return tuple(heads(part) for part in packed.split(WIDTH, -1))
        arranged = packed.reshape(len(x), -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return arranged.unbind(0) if self.packing == "unbind" else (arranged[0], arranged[1], arranged[2])

    def masks(self, q: Tensor) -> dict[str, Tensor | bool]:
        if self.mask == "causal":
            return {"is_causal": True}
        mask = {
            "none": None,
            "bool": self.allowed,
            "float": self.bias,
            "bool 4d": self.allowed.expand(len(q), 1, N, N),
            "float batch": self.bias.expand(len(q), HEADS, N, N),
            "of the image": (q.mean(-1, keepdim=True) > q.mean((1, 2, 3), keepdim=True)) | self.allowed,
        }[self.mask]
        return {} if mask is None else {"attn_mask": mask}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x)
        options = self.masks(q)
        options |= {} if self.scale is None else {"scale": self.scale}
        options |= {} if self.dropout is None else {"dropout_p": self.dropout}
        options |= {"enable_gqa": True} if self.gqa else {}
        if self.spelling == "names":
            mixed = F.scaled_dot_product_attention(query=q, key=k, value=v, **options)
        elif self.spelling == "mixed":
            mixed = F.scaled_dot_product_attention(q, k, value=v, **options)
        elif self.spelling == "values first":
            mixed = F.scaled_dot_product_attention(value=v, key=k, query=q, **options)
        elif self.spelling == "alias":
            mixed = torch._C._nn.scaled_dot_product_attention(q, k, v, **options)
        else:
            rest = (options.pop("attn_mask", None), options.pop("dropout_p", 0.0), options.pop("is_causal", False))
            mixed = F.scaled_dot_product_attention(q, k, v, *rest, **options)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))

    def reference(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x)
        bias = self.masks(q).get("attn_mask")
        if self.mask == "causal":
            bias = torch.ones(N, N, dtype=torch.bool).tril()
        bias = additive(bias) if bias is not None and bias.dtype == torch.bool else bias
        k, v = (part.repeat_interleave(HEADS // self.shared, 1) for part in (k, v))
        scale = self.scale or (WIDTH // HEADS) ** -0.5
        return x + self.out(merge(attend(q, k, v, scale, bias)))

    def extra_repr(self) -> str:
        return f"{self.packing}, {self.spelling}, {self.mask}, scale={self.scale}, gqa={self.gqa}"


@block("multi-head module")
class MultiHead(Pair):
    """``nn.MultiheadAttention``, whose fast path runs where there are no gradients."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.batch_first = random.random() < 0.6
        self.need_weights = random.choice([None, False, True])
        self.average = random.choice([None, False])
        self.mask = random.choice(["none", "bool", "float", "heads", "padding", "both"])
        self.same = random.random() < 0.6
        other = WIDTH if self.same or random.random() < 0.5 else WIDTH - 2
        extra = {"add_bias_kv": random.random() < 0.1, "add_zero_attn": random.random() < 0.1}
        shape = {} if other == WIDTH else {"kdim": other, "vdim": other}
        bias = random.random() < 0.7
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=self.batch_first, **shape, **extra)
        self.memory = linear(random, WIDTH, other)
        self.register_buffer("blocked", ~draw_mask(random))
        self.register_buffer("padding", torch.arange(N) >= N - random.randrange(1, 3))

    def masks(self, x: Tensor) -> dict[str, Tensor]:
        padding = self.padding.expand(len(x), N)
        bias = additive(~self.blocked)
        return {
            "none": {},
            "bool": {"attn_mask": self.blocked},
            "float": {"attn_mask": bias},
            "heads": {"attn_mask": self.blocked.repeat(len(x) * HEADS, 1, 1)},
            "padding": {"key_padding_mask": padding},
            "both": {"attn_mask": self.blocked & ~torch.eye(N, dtype=torch.bool), "key_padding_mask": padding},
        }[self.mask]

    def forward(self, x: Tensor) -> Tensor:
        memory = x if self.same else self.memory(x)
        options = self.masks(x)
        options |= {} if self.need_weights is None else {"need_weights": self.need_weights}
        options |= {} if self.average is None else {"average_attn_weights": self.average}
        if self.batch_first:
            return x + self.attention(x, memory, memory, **options)[0]
        turned = memory.transpose(0, 1)
        query = turned if self.same else x.transpose(0, 1)
        return x + self.attention(query, turned, turned, **options)[0].transpose(0, 1)

    def reference(self, x: Tensor) -> Tensor:
        memory = x if self.same else self.memory(x)
        module = self.attention
        weights = module.in_proj_weight.chunk(3) if module.in_proj_weight is not None else None
        weights = weights or (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else (None, None, None)
        q, k, v = (F.linear(part, w, b) for part, w, b in zip((x, memory, memory), weights, biases, strict=True))
        for name in ("bias_k", "bias_v"):
            row = getattr(module, name)
            if row is not None:
                row = row.expand(len(x), 1, WIDTH)
                k, v = (torch.cat([k, row], 1), v) if name == "bias_k" else (k, torch.cat([v, row], 1))
        if module.add_zero_attn:
            k, v = (torch.cat([part, torch.zeros(len(x), 1, WIDTH, dtype=x.dtype)], 1) for part in (k, v))
        bias = torch.zeros(len(x), 1, N, k.shape[1], dtype=x.dtype)
        masks = self.masks(x)
        if "attn_mask" in masks:
            blocked = masks["attn_mask"] if masks["attn_mask"].dtype == torch.bool else masks["attn_mask"].isinf()
            bias[..., :N] += additive(~(blocked[0] if blocked.ndim == 3 else blocked))
        if "key_padding_mask" in masks:
            bias[..., :N] += additive(~masks["key_padding_mask"])[:, None, None]
        mixed = attend(heads(q), heads(k), heads(v), (WIDTH // HEADS) ** -0.5, bias)
        return x + F.linear(merge(mixed), module.out_proj.weight, module.out_proj.bias)

    def extra_repr(self) -> str:
        return f"{self.mask}, need_weights={self.need_weights}, same={self.same}"


@block("multi-head module")
class EncoderLayer(Pair):
    """``nn.TransformerEncoderLayer``, alone or in a stack, with its fused fast path."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.name = random.choice(["relu", "gelu"])
        self.first, self.stacked = random.random() < 0.5, random.random() < 0.5
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 12, 0.0, self.name, batch_first=True, norm_first=self.first, bias=random.random() < 0.8
        )
        nested = not self.first and random.random() < 0.5
        self.stack = nn.TransformerEncoder(self.layer, 1, enable_nested_tensor=nested) if self.stacked else None
        self.register_buffer("blocked", ~draw_mask(random))
        self.masked = random.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        mask = self.blocked if self.masked else None
        return self.layer(x, mask) if self.stack is None else self.stack(x, mask=mask)

    def reference(self, x: Tensor) -> Tensor:
        layer = self.layer if self.stack is None else self.stack.layers[0]

        def norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
            x = centre(x, (-1,), module.eps) * module.weight
            return x if module.bias is None else x + module.bias

        def attention(x: Tensor) -> Tensor:
            module = layer.self_attn
            q, k, v = (heads(part) for part in F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1))
            bias = additive(~self.blocked) if self.masked else None
            return F.linear(
                merge(attend(q, k, v, (WIDTH // HEADS) ** -0.5, bias)), module.out_proj.weight, module.out_proj.bias
            )

        def feed(x: Tensor) -> Tensor:
            x = layer.linear1(x)
            return layer.linear2(gate(F.relu, x, 0.0) if self.name == "relu" else gate(F.gelu, x, 0.5))

        if self.first:
            x = x + attention(norm(layer.norm1, x))
            return x + feed(norm(layer.norm2, x))
        x = norm(layer.norm1, x + attention(x))
        return norm(layer.norm2, x + feed(x))
