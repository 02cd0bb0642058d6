"""Activations and gated layers in many spellings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from module_pairs.base import WIDTH, Form, Forms, Function, enter_forms, gate, hold_or_not, image, spell, tokens

erf, sqrt2 = torch.erf, math.sqrt(2)
ACTIVATIONS: dict[str, tuple[Function, float]] = {
    "relu": (F.relu, 0.0),
    "torch.relu": (torch.relu, 0.0),
    "relu method": (Tensor.relu, 0.0),
    "relu in place": (lambda x: F.relu(x.clone(), inplace=True), 0.0),
    "clamp": (lambda x: x * (x > 0), 0.0),
    "leaky": (lambda x: F.leaky_relu(x, negative_slope=0.1), 0.1),
    "relu6": (F.relu6, 0.0),
    "gelu": (F.gelu, 0.5),
    "gelu tanh": (lambda x: F.gelu(input=x, approximate="tanh"), 0.5),
    "gelu by hand": (lambda x: x * 0.5 * (1.0 + erf(x / sqrt2)), 0.5),
    "gelu by hand, halves": (lambda x: 0.5 * x * (erf(x / sqrt2) + 1), 0.5),
    "gelu new": (lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))), 0.5),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), 0.5),
    "silu": (F.silu, 0.5),
    "silu by hand": (lambda x: x / (1 + torch.exp(-x)), 0.5),
    "silu in place": (lambda x: F.silu(x.clone(), inplace=True), 0.5),
    "silu mul_": (lambda x: x.clone().mul_(x.sigmoid()), 0.5),
    "hardswish": (F.hardswish, 0.5),
    "hardswish by hand": (lambda x: x * F.relu6(x + 3) / 6, 0.5),
    "mish": (F.mish, 0.6),
    "mish by hand": (lambda x: x * torch.tanh(F.softplus(x)), 0.6),
    "elu": (F.elu, 1.0),
    "celu": (lambda x: F.celu(x, alpha=1.0), 1.0),
    "selu": (F.selu, 1.0507009873554805),
    "tanh": (torch.tanh, 1.0),
    "softsign": (F.softsign, 1.0),
    "softsign by hand": (lambda x: x / (1 + x.abs()), 1.0),
    "hardtanh": (F.hardtanh, 1.0),
    "abs": (torch.abs, 0.0),
    "softshrink": (F.softshrink, 0.0),
    "where": (lambda x: torch.where(x > 0, x, 0.2 * x), 0.2),
    "masked": (lambda x: x.masked_fill(x < 0, 0.0), 0.0),
    "sin gate": (lambda x: x * torch.sin(x), 0.0),
    "threshold": (lambda x: F.threshold(x, 0.0, 0.0), 0.0),
}
GATES: dict[str, Function] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "softmax": lambda x: x.softmax(-1),
    "silu by hand": lambda x: x * x.sigmoid(),
    "tanh": torch.tanh,
    "square relu": lambda x: F.relu(x) ** 2,
    "exp": lambda x: torch.exp(-x.square()),
}


def activation_forms(function: Function, at_zero: float) -> tuple[Form, Form]:
    return (lambda m, x: function(x)), (lambda m, x: gate(function, x, at_zero))


enter_forms("activations", "Activation", {name: activation_forms(*entry) for name, entry in ACTIVATIONS.items()})


def pairs_of(m: Forms, x: Tensor) -> Tensor:
    return m.packed(x).unflatten(-1, (WIDTH, 2))


def pick(x: Tensor) -> Tensor:
    """The largest of the last axis, by its place."""
    return x.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1)


def maxout(m: Forms, x: Tensor) -> Tensor:
    return pick(pairs_of(m, x))


def maxout_of_all(m: Forms, x: Tensor) -> Tensor:
    """As amax is derived: values that are equal, as they often are in half precision, share the derivative."""
    values = pairs_of(m, x)
    largest = (values == values.amax(-1, keepdim=True)).detach().to(values.dtype)
    return (values * largest / largest.sum(-1, keepdim=True)).sum(-1)


def pick_in_windows(m: Forms, x: Tensor) -> Tensor:
    padded = F.pad(image(x), (1, 1, 1, 1), value=-1e4)
    return pick(F.unfold(padded, 3).view(len(x), WIDTH, 9, 9).mT).mT


enter_forms(
    "activations",
    "ParametricActivation",
    {
        "prelu": (lambda m, x: F.prelu(x, m.scale[:1]), lambda m, x: torch.where(x > 0, x, x * m.scale[:1])),
        "relu squared": (lambda m, x: F.relu(x).square(), lambda m, x: F.relu(x) * F.relu(x).detach()),
        "relu to the third": (lambda m, x: F.relu(x) ** 3, lambda m, x: F.relu(x) * F.relu(x).square().detach()),
        "star relu": (
            lambda m, x: m.scale * torch.relu(x).pow(2) + m.shift,
            lambda m, x: m.scale * F.relu(x) * F.relu(x).detach() + m.shift,
        ),
        "swish with beta": (
            lambda m, x: x * torch.sigmoid(m.scale * x),
            lambda m, x: x * torch.sigmoid(m.scale * x).detach(),
        ),
        "maxout": (lambda m, x: pairs_of(m, x).amax(-1), maxout_of_all),
        "maxout by max": (lambda m, x: pairs_of(m, x).max(-1)[0], maxout),
        "maxout by values": (lambda m, x: torch.max(pairs_of(m, x), dim=-1).values, maxout),
        "max pool": (lambda m, x: tokens(F.max_pool2d(image(x), 3, 1, 1)), pick_in_windows),
    },
)


def gated(function: Function, spelling: str) -> tuple[Form, Form]:
    """A gate times a value, out of one layer or of two."""

    def halves(m: Forms, x: Tensor) -> tuple[Tensor, Tensor]:
        if spelling == "packed, chunk":
            left, right = m.packed(x).chunk(2, dim=-1)
        elif spelling == "packed, split":
            left, right = m.packed(x).split([WIDTH, WIDTH], -1)
        elif spelling == "packed, slices":
            both = m.packed(x)
            left, right = both[..., :WIDTH], both[..., WIDTH:]
        elif spelling == "packed, unbind":
            left, right = m.packed(x).unflatten(-1, (2, WIDTH)).unbind(-2)
        else:
            left, right = m.b(x), m.packed(x)[..., :WIDTH]
        return left, right

    def ordinary(m: Forms, x: Tensor) -> Tensor:
        left, right = halves(m, x)
        return torch.mul(right, function(left)) if spelling == "apart, mul" else function(left) * right

    def reference(m: Forms, x: Tensor) -> Tensor:
        left, right = halves(m, x)
        return function(left).detach() * right

    return ordinary, reference


PACKING = ("packed, chunk", "packed, split", "packed, slices", "packed, unbind", "apart", "apart, mul")
enter_forms(
    "gated layers",
    "GatedLayer",
    {f"{name}, {spelling}": gated(f, spelling) for name, f in GATES.items() for spelling in PACKING},
)


def squeeze_and_excite(m: Forms, x: Tensor, hold: Function) -> Tensor:
    return x * hold(torch.sigmoid(m.b(F.relu(x.mean(1, keepdim=True)))))


def excite_image(m: Forms, x: Tensor, hold: Function) -> Tensor:
    picture = image(x)
    weights = F.hardsigmoid(m.b(F.adaptive_avg_pool2d(picture, 1).flatten(1)))
    return tokens(picture * hold(weights)[:, :, None, None])


def soft_experts(m: Forms, x: Tensor, hold: Function) -> Tensor:
    share = hold(m.packed(x)[..., :2].softmax(-1))
    return share[..., :1] * m.b(x) + share[..., 1:] * x


def highway(m: Forms, x: Tensor, hold: Function) -> Tensor:
    share = hold(torch.sigmoid(m.packed(x)[..., WIDTH:]))
    return share * m.b(x) + (1 - share) * x


def highway_lerp(m: Forms, x: Tensor, hold: Function) -> Tensor:
    share = hold(torch.sigmoid(m.packed(x)[..., WIDTH:]))
    return x + share * (m.b(x) - x)


def spatial_softmax(m: Forms, x: Tensor, hold: Function) -> Tensor:
    return x * hold(F.softmax(m.b(x).mean(-1, keepdim=True), dim=1)) * x.shape[1]


def temperature(m: Forms, x: Tensor, hold: Function) -> Tensor:
    return m.b(x) / hold(1 + x.abs().mean((1, 2), keepdim=True))


enter_forms(
    "gated layers",
    "Modulation",
    hold_or_not(squeeze_and_excite, excite_image, soft_experts, highway, highway_lerp, spatial_softmax, temperature),
)
enter_forms(
    "gated layers",
    "FusedGate",
    spell(
        lambda m, x: m.packed(x)[..., :WIDTH] * m.packed(x)[..., WIDTH:].sigmoid().detach(),
        glu=lambda m, x: F.glu(m.packed(x)),
        glu_keyword=lambda m, x: F.glu(input=m.packed(x), dim=-1),
        glu_module=lambda m, x: torch.nn.GLU(dim=2)(m.packed(x)),
        glu_image=lambda m, x: F.glu(m.packed(x).mT, 1).mT,
    ),
)
