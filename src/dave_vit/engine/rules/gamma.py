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

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.calls import Call
from dave_vit.engine.fast.kernels import flat_gamma as fused
from dave_vit.engine.rules.products import in_grid, patches, products_win, side_by_side, weighted
from dave_vit.engine.states import is_carrier, is_operator, same_sign
from dave_vit.engine.surrogate import carry
from dave_vit.errors import OptionError

_IN_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_IN_MLP = re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE)
_IN_PATCHES = re.compile(r"patch_?embed", re.IGNORECASE)

Layer = Callable[..., Tensor]  # (x, weight, bias) -> z


_HELD = 768  # numbers of a row; with more of them at once, or in a loop, a compiler's kernel takes up to twice the time


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
        where = call.mode.current_module()
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
        favour = gamma / (2 + gamma)
        if call.name == "conv2d" and side_by_side(input, weight, *args, **kwargs):
            product = Call(call.mode, torch.nn.functional.linear, "linear")
            windows, matrix = patches(input, weight), weight.flatten(1)
            if products_win(input):
                value = product.func(windows.detach(), matrix, bias)
            else:
                value = call.func(input.detach(), weight, bias, *args, **kwargs).flatten(2).transpose(1, 2)
            return in_grid(self._carried(product, favour, value, windows, matrix, bias), input, weight)
        value = call.func(input.detach(), weight, bias, *args, **kwargs)
        return self._carried(call, favour, value, input, weight, bias, *args, **kwargs)

    def _carried(
        self,
        call: Call,
        favour: float,
        value: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The layer's own value with the rule's derivative."""

        def layer(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            return call.func(x, w, b, *args, **kwargs)  # type: ignore[no-any-return]

        x = input.detach()
        flat, spatial = self.flat and _sees_all(call, input, weight), 0 if call.name == "linear" else weight.ndim - 2
        form = _flat_form(call, x, weight, bias, value) if flat else _Full
        made = form(layer, favour, spatial)
        # The sign alone of what the model may write over later.
        like = x.sign() if call.mode.writes else same_sign(input)
        kept = made.kept(x, weight, bias, value)
        passed = carry(lambda: value, made.pull, input, saved=(like, weight, *kept))
        return call.mode.record_constant(
            passed, lambda: made.of_bias(bias, made.share(x, weight, bias, value), value), call.name
        )


def _sees_all(call: Call, input: Tensor, weight: Tensor) -> bool:
    """Whether every output of a layer is made of all inputs: not in groups, nor where a convolution is transposed."""
    if call.name == "linear":
        return True
    return call.name in ("conv1d", "conv2d", "conv3d") and input.shape[1 - weight.ndim] == weight.shape[1]


def _flat_form(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> type[_Flat]:
    """How the flat rule is computed; the quicker forms keep a layer's output, which must stay as it is."""
    if call.name != "linear" or call.mode.writes:
        return _Flat
    if call.mode.traced:
        return _Again
    return _Fused if fused.applicable(x, weight, bias, value) else _Flat


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

    def kept(self, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> tuple[Tensor | None, ...]:
        """What the way back needs, beside the weight and the signs of x."""
        return (self.share(x, weight, bias, value),)

    def share(self, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> Tensor:
        """s = z / (|z| + c a), with the sign of z; 0 where there is nothing to share."""
        size = self._size(x.abs(), weight.abs(), None if bias is None else bias.abs())
        return self._shared(value, size).to(value.dtype)

    def pull(self, grad: Tensor, like: Tensor, weight: Tensor, *kept: Any) -> Tensor:
        """What the inputs get of the relevance, for each unit of them; ``like`` has their signs."""
        share, *means = kept
        weight, share = weight.to(grad.dtype), share.to(grad.dtype)
        held = share.abs().mul_(grad)  # and again below: memory that is new has to be cleared first
        plain = self._back(held, weight, like.shape)
        favoured = self._favoured(torch.mul(grad, share, out=held), weight, like.shape, *means)
        return plain.addcmul_(like.sign().to(grad.dtype), favoured, value=self.favour)

    def of_bias(self, bias: Tensor | None, share: Tensor, value: Tensor) -> Tensor:
        """The part of the output that is the bias's: times the derivative it is the bias's relevance."""
        if bias is None:
            return torch.zeros_like(value)
        own = self._by_output(bias)
        return share.abs() * (own + self.favour * value.sign() * own.abs())

    @torch.no_grad()
    def _shared(self, value: Tensor, size: Tensor) -> Tensor:
        """s of z and a, in at least float32."""
        z = value.to(working_dtype(value.dtype))
        whole = self._whole(z, size)
        return torch.div(z, whole, out=whole)

    def _whole(self, z: Tensor, size: Tensor) -> Tensor:
        """|z| + c a, above 0; where there is nothing to share, z is 0."""
        whole = z.abs().add_(size, alpha=self.favour)
        return whole.clamp_min_(torch.finfo(whole.dtype).tiny)

    def _size(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """a, of absolute values."""
        return self.layer(x, weight, bias)

    def _favoured(self, grad: Tensor, weight: Tensor, shape: torch.Size, *means: Tensor) -> Tensor:
        return self._back(grad, weight.abs(), shape)

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

    def kept(self, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> tuple[Tensor | None, ...]:
        means = _rank_one(weight.abs())
        return self._shared(value, self._mean_size(x.abs(), bias, *means)).to(value.dtype), *means

    def _size(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._mean_size(x, bias, *_rank_one(weight))

    def _mean_size(self, x: Tensor, bias: Tensor | None, of_output: Tensor, of_input: Tensor) -> Tensor:
        size = self.layer(x, of_input)  # one output
        if bias is None:
            return size * self._by_output(of_output)
        return torch.addcmul(self._by_output(bias.abs()), size, self._by_output(of_output))

    def _favoured(self, grad: Tensor, weight: Tensor, shape: torch.Size, *means: Tensor) -> Tensor:
        of_output, of_input = (mean.to(grad.dtype) for mean in means)
        if not self.spatial:
            return (grad @ of_output).unsqueeze(-1) * of_input[0]
        summed = (grad * self._by_output(of_output)).sum(-1 - self.spatial, keepdim=True)
        return self._back(summed, of_input, shape)


class _Again(_Flat):
    """The flat rule of a linear layer for a compiler.

    Products with one row are written as sums, which are fused into the kernels beside them, and s is computed again on
    the way back: of z, which is there anyway, and of one number a token.
    """

    def kept(self, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> tuple[Tensor | None, ...]:
        of_output, of_input = _rank_one(weight.abs())
        wide = working_dtype(value.dtype)
        size = _summed(x.to(wide).abs() * of_input[0].to(wide))  # [..., 1]
        return value, size, bias, of_output, of_input

    def pull(self, grad: Tensor, like: Tensor, weight: Tensor, *kept: Any) -> Tensor:
        value, size, bias, of_output, of_input = kept
        amount = size * of_output if bias is None else size * of_output + bias.abs()
        share = self._shared(value, amount)
        plain = (grad * share.abs()).to(grad.dtype) @ weight.to(grad.dtype)
        favoured = self.favour * _summed(grad * share * of_output) * of_input[0]
        signed = torch.where(like > 0, favoured, torch.where(like < 0, -favoured, 0))  # quicker than a product
        return plain + signed

    def _shared(self, value: Tensor, size: Tensor) -> Tensor:
        z = value.to(working_dtype(value.dtype))
        if z.dtype == value.dtype:
            return z / self._whole(z, size)
        root = self._whole(z, size).rsqrt()
        return z * (root * root)  # of half types, in a third of a quotient's instructions


class _Fused(_Flat):
    """The flat rule of a linear layer by kernels of our own, each for all that is done to a row at a time."""

    def kept(self, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> tuple[Tensor | None, ...]:
        of_output, of_input = fused.absolute_sums(weight)
        return value, fused.sizes(x, of_input), bias, of_output, of_input

    def pull(self, grad: Tensor, like: Tensor, weight: Tensor, *kept: Any) -> Tensor:
        value, size, bias, of_output, of_input = kept
        shared, summed = fused.shared(grad, value, size, bias, of_output, favour=self.favour)
        plain = shared @ weight.to(grad.dtype)
        return fused.add_favoured_(plain, like, summed, of_input, favour=self.favour)


def _summed(values: Tensor) -> Tensor:
    """Over the last axis, ``[..., 1]``; long rows in equal pieces that a compiler's kernel holds at once."""
    width = values.shape[-1]
    piece = width if width <= _HELD else next((size for size in range(_HELD, 255, -1) if width % size == 0), width)
    pieces: Tensor = values.unflatten(-1, (-1, piece))
    return pieces.sum(-1).sum(-1, keepdim=True)


def _rank_one(weight: Tensor) -> tuple[Tensor, Tensor]:
    """u ``[O]`` and v ``[1, I, ...]`` with u v the mean of ``weight`` by rows and columns."""
    of_input, of_output = weight.mean(0, keepdim=True), weight.flatten(1).mean(1)
    mean = of_output.mean()
    return of_output / torch.where(mean > 0, mean, 1), of_input
