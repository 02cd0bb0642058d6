"""Norms in many spellings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from module_pairs.base import WIDTH, Forms, Function, centre, enter_forms, gate, image, spell, tokens

EPS = 1e-5


def held_norm(m: Forms, x: Tensor) -> Tensor:
    return centre(x, (-1,), EPS) * m.scale + m.shift


def by_statistics(m: Forms, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(-1, keepdim=True) + EPS) * m.scale + m.shift


def by_var_mean(m: Forms, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, dim=-1, unbiased=False, keepdim=True)
    return torch.addcmul(m.shift, (x - mean) * torch.rsqrt(var + EPS), m.scale)


def by_in_place(m: Forms, x: Tensor) -> Tensor:
    x = x - x.mean(dim=-1, keepdim=True)
    x /= (x**2).mean(-1, keepdim=True).add(EPS).sqrt()
    return x.mul(m.scale).add(m.shift)


def by_module_cast(m: Forms, x: Tensor) -> Tensor:
    """As transformers write it, in the wider of two types."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    var = wide.var(-1, correction=0, keepdim=True)
    return ((wide - wide.mean(-1, True)) * (var + EPS) ** -0.5).to(x.dtype) * m.scale + m.shift


enter_forms(
    "norms",
    "LayerNorm",
    spell(
        held_norm,
        function=lambda m, x: F.layer_norm(x, (WIDTH,), m.scale, m.shift),
        keywords=lambda m, x: F.layer_norm(input=x, normalized_shape=[WIDTH], bias=m.shift, weight=m.scale, eps=EPS),
        torch=lambda m, x: torch.layer_norm(x, (WIDTH,), m.scale, m.shift, EPS),
        apart=lambda m, x: F.layer_norm(x, x.shape[-1:]) * m.scale + m.shift,
        native=lambda m, x: torch.native_layer_norm(x, (WIDTH,), m.scale, m.shift, EPS)[0],
        statistics=by_statistics,
        var_mean=by_var_mean,
        in_place=by_in_place,
        cast=by_module_cast,
        one_group=lambda m, x: F.group_norm(x.flatten(0, 1), 1, m.scale, m.shift).view_as(x),
        std=lambda m, x: (
            (x - x.mean(-1, True)) / (x.std(-1, unbiased=False, keepdim=True).square() + EPS).sqrt() * m.scale + m.shift
        ),
    ),
)


def held_rms(m: Forms, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt().detach() * m.scale


def by_norm(m: Forms, x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / (length**2 / WIDTH + EPS).sqrt() * m.scale


def by_wide_type(m: Forms, x: Tensor) -> Tensor:
    wide = x.to(torch.float64)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return m.scale * wide.type_as(x)


enter_forms(
    "norms",
    "RootMeanSquare",
    spell(
        held_rms,
        function=lambda m, x: F.rms_norm(x, (WIDTH,), m.scale, EPS),
        keywords=lambda m, x: F.rms_norm(input=x, normalized_shape=(WIDTH,), eps=EPS, weight=m.scale),
        torch=lambda m, x: torch.rms_norm(x, [WIDTH], m.scale, EPS),
        apart=lambda m, x: F.rms_norm(x, [WIDTH], eps=EPS).mul(m.scale),
        llama=lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * m.scale,
        square=lambda m, x: x.div(torch.sqrt(torch.mean(torch.square(x), dim=-1, keepdim=True) + EPS)) * m.scale,
        product=lambda m, x: x * (x * x).mean(-1, True).add(EPS).rsqrt() * m.scale,
        power=lambda m, x: x * torch.pow(x.pow(2).mean(-1, keepdim=True) + EPS, -0.5) * m.scale,
        norm=by_norm,
        wide=by_wide_type,
        sum=lambda m, x: x * (x.square().sum(-1, keepdim=True) / WIDTH + EPS) ** -0.5 * m.scale,
    ),
)
enter_forms(
    "norms",
    "DefaultEpsilon",
    spell(
        lambda m, x: gate(lambda y: F.rms_norm(y, (WIDTH,), m.scale), x, 0.0),  # whatever its epsilon is
        function=lambda m, x: F.rms_norm(x, (WIDTH,), m.scale),
        keywords=lambda m, x: F.rms_norm(x, normalized_shape=(WIDTH,), weight=m.scale),
    ),
)


def unit(x: Tensor, hold: Function) -> Tensor:
    return x / hold(x.norm(dim=-1, keepdim=True))


enter_forms(
    "norms",
    "UnitLength",
    spell(
        lambda m, x: unit(x, Tensor.detach),
        function=lambda m, x: F.normalize(x, dim=-1),
        keywords=lambda m, x: F.normalize(input=x, p=2, dim=2, eps=1e-12),
        norm=lambda m, x: x / x.norm(p=2, dim=-1, keepdim=True),
        linalg=lambda m, x: x / torch.linalg.norm(x, dim=-1, keepdim=True),
        clamped=lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12).expand_as(x),
        product=lambda m, x: torch.einsum("btd,bt->btd", x, x.pow(2).sum(-1).rsqrt()),
    ),
)


def group_norm_held(m: Forms, x: Tensor) -> Tensor:
    grouped = image(x).unflatten(1, (2, -1))
    return tokens(centre(grouped, (2, 3, 4), EPS).flatten(1, 2) * m.scale[:, None, None] + m.shift[:, None, None])


def group_norm_by_hand(m: Forms, x: Tensor) -> Tensor:
    grouped = image(x).reshape(len(x), 2, -1)
    var, mean = torch.var_mean(grouped, dim=2, keepdim=True, correction=0)
    normed = ((grouped - mean) / (var + EPS).sqrt()).reshape(len(x), WIDTH, 3, 3)
    return tokens(normed * m.scale.view(1, -1, 1, 1) + m.shift.view(1, -1, 1, 1))


enter_forms(
    "norms",
    "GroupNorm",
    spell(
        group_norm_held,
        function=lambda m, x: tokens(F.group_norm(image(x), 2, m.scale, m.shift)),
        keywords=lambda m, x: tokens(F.group_norm(input=image(x), num_groups=2, weight=m.scale, bias=m.shift, eps=EPS)),
        by_hand=group_norm_by_hand,
    ),
)
enter_forms(
    "norms",
    "OtherNorms",
    {
        "instance": (
            lambda m, x: tokens(F.instance_norm(image(x), weight=m.scale, bias=m.shift)),
            lambda m, x: centre(x, (1,), EPS) * m.scale + m.shift,
        ),
        "batch": (
            lambda m, x: tokens(F.batch_norm(image(x), m.shift, m.scale.square(), weight=m.latent, bias=m.shift)),
            lambda m, x: (x - m.shift) * (m.scale.square() + EPS).rsqrt() * m.latent + m.shift,
        ),
        "batch by keywords": (
            lambda m, x: (
                F.batch_norm(x.mT, running_mean=m.shift, running_var=m.scale.square(), training=False, eps=EPS).mT
            ),
            lambda m, x: (x - m.shift) * (m.scale.square() + EPS).rsqrt(),
        ),
        "tanh": (
            lambda m, x: torch.tanh(m.amount * x) * m.scale + m.shift,
            lambda m, x: gate(lambda y: torch.tanh(m.amount * y), x, m.amount) * m.scale + m.shift,
        ),
        "response": (  # ConvNeXt V2
            lambda m, x: m.scale * (x * (x.norm(dim=1, keepdim=True) / x.norm(dim=1, keepdim=True).mean(-1, True))) + x,
            lambda m, x: (
                m.scale * (x * (x.norm(dim=1, keepdim=True) / x.norm(dim=1, keepdim=True).mean(-1, True)).detach()) + x
            ),
        ),
        "of two parts": (
            lambda m, x: torch.cat([F.layer_norm(part, part.shape[-1:]) for part in x.chunk(2, -1)], -1),
            lambda m, x: torch.cat([centre(part, (-1,), EPS) for part in x.chunk(2, -1)], -1),
        ),
        "local response": (
            lambda m, x: x / (1 + F.avg_pool1d(x.square(), 3, 1, 1)) ** 0.75,
            lambda m, x: x / ((1 + F.avg_pool1d(x.square(), 3, 1, 1)) ** 0.75).detach(),
        ),
    },
)
