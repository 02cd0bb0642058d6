"""Attention written out, and by other kernels than softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from module_pairs.attention import additive, attend
from module_pairs.base import (
    HEADS,
    TOKENS,
    WIDTH,
    Forms,
    Function,
    enter_forms,
    heads,
    hold_or_not,
    merge,
    spell,
)

N = TOKENS


def parts(m: Forms, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = m.packed(x).chunk(2, -1)
    return heads(q), heads(k), heads(m.b(x))


def held(m: Forms, x: Tensor) -> Tensor:
    q, k, v = parts(m, x)
    return merge(attend(q, k, v, 0.5, additive(m.mask)))


def by_method(m: Forms, x: Tensor) -> Tensor:
    q, k, v = parts(m, x)
    return merge((q @ k.mT / 2).masked_fill(~m.mask, -math.inf).softmax(dim=-1) @ v)


def by_exp(m: Forms, x: Tensor) -> Tensor:
    q, k, v = parts(m, x)
    scores = torch.where(m.mask, q @ k.mT / 2, torch.tensor(-1e30, dtype=x.dtype))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return merge((weights / weights.sum(-1, keepdim=True)) @ v)


def by_late_division(m: Forms, x: Tensor) -> Tensor:
    q, k, v = parts(m, x)
    weights = torch.exp(q @ k.transpose(2, 3) * 0.5) * m.mask
    return merge(torch.matmul(weights, v) / weights.sum(-1)[..., None])


def by_einsum(m: Forms, x: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in parts(m, x))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.5) + additive(m.mask)
    return torch.einsum("bhqk,bkhd->bqhd", F.softmax(scores, -1), v).flatten(2)


def by_einsum_sublists(m: Forms, x: Tensor) -> Tensor:
    q, k, v = parts(m, x)
    scores = torch.einsum(q, [0, 1, 2, 4], k, [0, 1, 3, 4], [0, 1, 2, 3]) / 2 + additive(m.mask)
    return merge(torch.einsum(scores.softmax(-1), [0, 1, 2, 3], v, [0, 1, 3, 4], [0, 1, 2, 4]))


def by_bmm(m: Forms, x: Tensor) -> Tensor:
    q, k, v = (part.flatten(0, 1) for part in parts(m, x))
    start = additive(m.mask).expand(len(q), -1, -1)
    weights = torch.softmax(torch.baddbmm(start, q, k.mT, alpha=0.5), 2)
    return merge(torch.bmm(weights, v).unflatten(0, (len(x), HEADS)))


def by_loop(m: Forms, x: Tensor) -> Tensor:
    q, k, v = parts(m, x)
    mixed = []
    for head in range(HEADS):
        scores = (q[:, head] / 2) @ k[:, head].mT
        mixed.append(F.softmax(scores + additive(m.mask), dim=-1) @ v[:, head])
    return torch.cat(mixed, -1)


def by_log_softmax(m: Forms, x: Tensor) -> Tensor:
    q, k, v = parts(m, x)
    return merge((q @ k.mT / 2 + additive(m.mask)).log_softmax(-1).exp() @ v)


def by_module(m: Forms, x: Tensor) -> Tensor:
    q, k, v = parts(m, x)
    matrix = nn.Softmax(dim=-1)(q @ k.mT / 2 + additive(m.mask))
    return merge(torch.einsum("...qk,...kd->...qd", F.dropout(matrix, 0.3, training=False), v))


def by_logsumexp(m: Forms, x: Tensor) -> Tensor:
    q, k, v = parts(m, x)
    scores = q @ k.mT / 2 + additive(m.mask)
    return merge((scores - torch.logsumexp(scores, -1, keepdim=True)).exp() @ v)


def by_chunks(m: Forms, x: Tensor) -> Tensor:
    """Keys in two parts with running sums, as flash attention does it."""
    q, k, v = parts(m, x)
    total, sums = 0, 0
    for part in (slice(0, 4), slice(4, None)):
        weights = (q @ k[:, :, part].mT / 2).exp() * m.mask[:, part]
        total, sums = total + weights @ v[:, :, part], sums + weights.sum(-1, keepdim=True)
    return merge(total / sums)


enter_forms(
    "attention written out",
    "WrittenAttention",
    spell(
        held,
        method=by_method,
        exp=by_exp,
        late_division=by_late_division,
        einsum=by_einsum,
        einsum_sublists=by_einsum_sublists,
        bmm=by_bmm,
        loop=by_loop,
        log_softmax=by_log_softmax,
        module=by_module,
        logsumexp=by_logsumexp,
        chunks=by_chunks,
    ),
)


def linear_attention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k = (hold(F.elu(part) + 1) for part in m.packed(x).chunk(2, -1))
    return q @ (k.mT @ m.b(x)) / (q @ k.sum(1, keepdim=True).mT)


def efficient_attention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k = m.packed(x).chunk(2, -1)
    return torch.matmul(hold(q.softmax(-1)), hold(k.softmax(1)).mT @ m.b(x))


def sigmoid_attention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k = m.packed(x).chunk(2, -1)
    return hold(torch.sigmoid(q @ k.mT - math.log(N))) @ m.b(x)


def relu_attention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k = m.packed(x).split(WIDTH, -1)
    return hold(F.relu(torch.einsum("bqd,bkd->bqk", q, k)).div(N)) @ m.b(x)


def cosine_attention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k = (F.normalize(part, dim=-1) for part in m.packed(x).chunk(2, -1))
    return hold((q @ k.mT * 3).softmax(-1)) @ m.b(x)


def distance_attention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k = m.packed(x).chunk(2, -1)
    return hold((-torch.cdist(hold(q), hold(k))).softmax(-1)) @ m.b(x)


def latent_attention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    """Queries that do not depend on the image."""
    query = m.position.expand(len(x), -1, -1)
    return hold((query @ m.packed(x)[..., :WIDTH].mT).softmax(-1)) @ m.b(x)


def pooled_attention(m: Forms, x: Tensor, hold: Function) -> Tensor:
    weights = torch.softmax(m.packed(x)[..., :WIDTH] @ m.latent, dim=1).unsqueeze(-1)
    return (hold(weights) * m.b(x)).sum(1, keepdim=True).expand(-1, N, -1)


def talking_heads(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k, v = parts(m, x)
    mixing = m.scale.view(HEADS * 2, 2)[:2]
    matrix = torch.einsum("bhqk,gh->bgqk", (q @ k.mT).softmax(-1), mixing)
    return merge(hold(matrix) @ v)


def differential(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k, v = parts(m, x)
    left, right = ((q[..., part] @ k[..., part].mT).softmax(-1) for part in (slice(0, 2), slice(2, 4)))
    return merge(hold(left - m.amount * right) @ v)


def position_bias(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k, v = parts(m, x)
    bias = m.position[0].flatten()[(m.order[:, None] - m.order[None] + N) % WIDTH]
    return merge(hold((q @ k.mT + bias).softmax(-1)) @ v)


def rotary(m: Forms, x: Tensor, hold: Function) -> Tensor:
    q, k, v = parts(m, x)
    angles = torch.outer(torch.arange(N, dtype=x.dtype), torch.tensor([1.0, 0.1], dtype=x.dtype))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    q, k = (part * cos + torch.cat([-part[..., 2:], part[..., :2]], -1) * sin for part in (q, k))
    return merge(hold((q @ k.mT / 2).softmax(-1)) @ v)


KERNELS = (linear_attention, efficient_attention, sigmoid_attention, relu_attention, cosine_attention)
KERNELS += (distance_attention, latent_attention, pooled_attention, talking_heads, differential, position_bias, rotary)
enter_forms("attention written out", "KernelAttention", hold_or_not(*KERNELS))


def fuse(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **options: object) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias, **options)


def write_out(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    bias = additive(torch.ones(q.shape[-2], k.shape[-2]).tril().bool()) if is_causal else bias
    return attend(q, k, v, scale or q.shape[-1] ** -0.5, bias)


def without_heads(m: Forms, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    return attention(*m.packed(x).chunk(2, -1), m.b(x), None)


def five_dimensions(m: Forms, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    return merge(attention(*(part[:, None] for part in parts(m, x)), additive(m.mask))[:, 0])


def fewer_keys(m: Forms, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    q, k, v = parts(m, x)
    return merge(attention(q, k[:, :, :4], v[:, :, :4], None, scale=0.3))


def more_keys(m: Forms, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    q, k, v = parts(m, x)
    return F.pad(merge(attention(q[:, :, :4], k, v, None, is_causal=True)), (0, 0, 0, N - 4))


def wider_values(m: Forms, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    q, k = m.packed(x).chunk(2, -1)
    return attention(heads(q)[:, 0], heads(k)[:, 1], m.b(x), None)


def mask_of_heads(m: Forms, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    bias = torch.linspace(-1, 1, HEADS, dtype=x.dtype)[:, None, None] * m.position[0, :, :1]
    return merge(attention(*parts(m, x), bias, scale=-0.5))


def learned_queries(m: Forms, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    _, k, v = parts(m, x)
    return merge(attention(heads(m.position).expand(len(x), -1, -1, -1), k, v, None))


def class_token(m: Forms, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    every = [heads(torch.cat([m.latent.expand(len(x), 1, -1), part], 1)) for part in (x, m.a(x), m.b(x))]
    return merge(attention(*every, None)[:, :, :1]).expand(-1, N, -1)


SHAPES = (without_heads, five_dimensions, fewer_keys, more_keys, wider_values, mask_of_heads)
enter_forms(
    "sdpa",
    "AttentionShapes",
    {
        f.__name__: (partial(f, attention=fuse), partial(f, attention=write_out))
        for f in (*SHAPES, learned_queries, class_token)
    },
)
