"""The gamma rule: linear layers prefer what agrees with the sign of their output.

Contributions x_i w_ji to an output z_j count 1 + gamma times where their sign is that of z_j, and relevance is handed
out in proportion. With c = gamma / (2 + gamma) and absolute values |w| this takes two products for one:

    a_j = sum_i |x_i| |w_ji| + |b_j|,    s_j = z_j / (|z_j| + c a_j)
    grad_x = (grad * |s|) W + c sign(x) ((grad * s) |W|)

The flat form puts the rank-one mean u_j v_i in the place of |w_ji| in both, so that no product is added: only the mean
of a layer's weights is favoured by sign. Either way all relevance arrives:
sum_i x_i grad_i + sum_j grad_j |s_j| (b_j + c sign(z_j) |b_j|) = sum_j grad_j z_j.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dave_vit.errors import OptionError
from dave_vit.intercept.calls import Call
from dave_vit.intercept.states import is_carrier, is_operator
from dave_vit.intercept.surrogate import carry
from dave_vit.precision import working_dtype
from dave_vit.rules.products import weighted

_IN_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_IN_MLP = re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE)
_IN_PATCHES = re.compile(r"patch_?embed", re.IGNORECASE)

Layer = Callable[..., Tensor]  # (x, weight, bias) -> z


@dataclass(frozen=True)
class Gamma:
    """How much linear layers prefer what agrees with the sign of their output; 0 is the plain rule.

    Attributes:
        conv: for convolutions, and for a linear layer that embeds patches, which is one.
        linear: for linear layers outside of attention.
        attention: for the projections of attention (queries, keys, values, output).
        flat: by the mean of the weights only, without a product more.
    """

    conv: float = 0.25
    linear: float = 0.05
    attention: float = 0.0
    flat: bool = False

    def __post_init__(self) -> None:
        for name in ("conv", "linear", "attention"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"gamma for {name} is {getattr(self, name)}; give a finite number, 0 or above")

    def of(self, call: Call) -> float:
        """The gamma of one call; attention and patch embedding are told by the name of the module."""
        if call.name != "linear":
            return self.conv
        where = call.mode.module()
        if _IN_PATCHES.search(where):
            return self.conv
        return self.attention if _IN_ATTENTION.search(where) and not _IN_MLP.search(where) else self.linear

    def rule(
        self, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Linear layers and convolutions."""
        plain = not is_carrier(input) or any(is_carrier(part) or is_operator(part) for part in (weight, bias))
        # A look into the model asks for values and states alone.
        gamma = 0.0 if plain or call.mode.watch is not None else self.of(call)
        if gamma == 0.0:
            return weighted(call, input, weight, bias, *args, **kwargs)

        def layer(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            return call.func(x, w, b, *args, **kwargs)  # type: ignore[no-any-return]

        flat = self.flat and _sees_all(call, input, weight)
        made = (_Flat if flat else _Full)(layer, gamma / (2 + gamma), 0 if call.name == "linear" else weight.ndim - 2)
        x = input.detach()
        value = layer(x, weight, bias)
        share = made.share(x, weight, bias, value)
        # The sign and not x itself, which the model may write over later.
        passed = carry(lambda: value, made.pull, input, saved=(share, x.sign(), weight))
        return call.mode.with_constant(passed, lambda: made.of_bias(bias, share, value), call.name)


def _sees_all(call: Call, input: Tensor, weight: Tensor) -> bool:
    """Whether every output of a layer is made of all inputs: not in groups, nor where a convolution is transposed."""
    if call.name == "linear":
        return True
    return call.name in ("conv1d", "conv2d", "conv3d") and input.shape[1 - weight.ndim] == weight.shape[1]


@dataclass(frozen=True)
class _Full:
    """The rule with the absolute value of each weight.

    Attributes:
        layer: as a function of input, weight and bias.
        favour: c.
        spatial: dimensions that follow the outputs: none in linear layers, two in a convolution of pictures.
    """

    layer: Layer
    favour: float
    spatial: int

    def share(self, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> Tensor:
        """s = z / (|z| + c a), with the sign of z; 0 where there is nothing to share."""
        wide = working_dtype(value.dtype)
        z, size = value.to(wide), self._size(x.abs(), weight.abs(), None if bias is None else bias.abs()).to(wide)
        whole = z.abs() + self.favour * size
        return (z / torch.where(whole > 0, whole, 1)).to(value.dtype)

    def pull(self, grad: Tensor, share: Tensor, sign: Tensor, weight: Tensor) -> Tensor:
        """What the inputs get of the relevance, for each unit of them."""
        weight, share = weight.to(grad.dtype), share.to(grad.dtype)
        plain = self._back(grad * share.abs(), weight, sign.shape)
        favoured = self._favoured(grad * share, weight.abs(), sign.shape)
        return torch.addcmul(plain, sign.to(grad.dtype), favoured, value=self.favour)

    def of_bias(self, bias: Tensor | None, share: Tensor, value: Tensor) -> Tensor:
        """The part of the output that is the bias's: times the derivative it is the bias's relevance."""
        if bias is None:
            return torch.zeros_like(value)
        own = self._by_output(bias)
        return share.abs() * (own + self.favour * value.sign() * own.abs())

    def _size(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """a, of absolute values."""
        return self.layer(x, weight, bias)

    def _favoured(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return self._back(grad, weight, shape)

    def _back(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The layer's adjoint."""
        if not self.spatial:
            return grad @ weight
        with torch.enable_grad():
            at = torch.zeros(shape, dtype=grad.dtype, device=grad.device, requires_grad=True)
            return torch.autograd.grad(self.layer(at, weight), at, grad)[0]

    def _by_output(self, values: Tensor) -> Tensor:
        """One value an output ``[O]``, in the shape in which it meets the layer's result."""
        return values.reshape(-1, *[1] * self.spatial)


class _Flat(_Full):
    """The rule with the rank-one mean of the weights' absolute values."""

    def _size(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_output, of_input = _rank_one(weight)
        size = self.layer(x, of_input) * self._by_output(of_output)
        return size if bias is None else size + self._by_output(bias)

    def _favoured(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        of_output, of_input = _rank_one(weight)
        if not self.spatial:
            return (grad @ of_output).unsqueeze(-1) * of_input[0]
        summed = (grad * self._by_output(of_output)).sum(-1 - self.spatial, keepdim=True)
        return self._back(summed, of_input, shape)


def _rank_one(weight: Tensor) -> tuple[Tensor, Tensor]:
    """u ``[O]`` and v ``[1, I, ...]`` with u v the mean of ``weight`` by rows and columns."""
    of_input, of_output = weight.mean(0, keepdim=True), weight.flatten(1).mean(1)
    mean = of_output.mean()
    return of_output / torch.where(mean > 0, mean, 1), of_input
