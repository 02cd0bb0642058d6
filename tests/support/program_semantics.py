"""What the oracle knows of each instruction: which arguments carry, which are held, and what is then computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from programs import BIAS, KERNEL, QKV, QKV_BIAS, Outcome, Semantics, State, Value, W


def held(*values: Value) -> Outcome:
    """Neither linear nor a selection: it can only be an operator."""
    return (State.OPERATOR if any(v.depends for v in values) else State.CONSTANT), None


def total(function: Callable[..., Tensor], *, places: int = 0) -> Semantics:
    """Affine in all arguments together but the first ``places``, which only say where."""

    def means(*values: Value) -> Outcome:
        terms = values[places:]
        carriers = [v for v in terms if v.carries]
        if not carriers or any(v.state is State.OPERATOR for v in terms):
            return held(*values)
        alone = len(carriers) == 1 and carriers[0].state is State.GATE
        live = function(*(v.at for v in values[:places]), *(v.live for v in terms))
        return (State.GATE if alone else State.CARRIER), live

    return means


def move(function: Callable[[Tensor], Tensor], *, mixes: bool = False) -> Semantics:
    """Linear in its one argument; a gate stays a gate where elements stay apart."""

    def means(value: Value) -> Outcome:
        if not value.carries:
            return held(value)
        return (State.CARRIER if mixes else value.state), function(value.live)

    return means


def product(function: Callable[..., Tensor], *, mixes: bool = False) -> Semantics:
    """Linear in each argument: of two carriers the activation's output is held, without one of them both are."""

    def means(*values: Value) -> Outcome:
        carriers = [v for v in values if v.carries]
        if len(carriers) == 1:
            live = function(*(v.live for v in values))
            return (State.CARRIER if mixes else carriers[0].state), live
        if sum(v.state is State.CARRIER for v in carriers) != 1:
            return held(*values)
        return State.CARRIER, function(*(v.at if v.state is State.GATE else v.live for v in values))

    return means


def activation(function: Callable[[Tensor], Tensor], at_zero: float) -> Semantics:
    """f(x) = x * phi(x), phi held."""

    def means(value: Value) -> Outcome:
        if not value.carries:
            return held(value)
        gate = torch.where(value.at == 0, at_zero, function(value.at) / torch.where(value.at == 0, 1, value.at))
        return State.GATE, value.live * gate

    return means


def selection(function: Callable[[Tensor], Tensor]) -> Semantics:
    """Piecewise linear and homogeneous: its own derivative at the recorded value."""

    def means(value: Value) -> Outcome:
        if not value.carries:
            return held(value)
        return State.GATE, torch.func.jvp(function, (value.at,), (value.live,))[1]

    return means


def first_carries(function: Callable[..., Tensor]) -> Semantics:
    """Linear in the first argument, whatever the others are: ``function(live, at of the first, at of the others)``."""

    def means(first: Value, *others: Value) -> Outcome:
        if not first.carries:
            return held(first, *others)
        return State.CARRIER, function(first.live, first.at, *(v.at for v in others))

    return means


def last_carries(function: Callable[..., Tensor]) -> Semantics:
    """Attention: linear in its values, which come last."""

    def means(*values: Value) -> Outcome:
        if not values[-1].carries:
            return held(*values)
        return State.CARRIER, function(*(v.at for v in values[:-1]), values[-1].live)

    return means


def scaled(function: Callable[..., Tensor]) -> Semantics:
    """A quotient: the denominator is held, and a gate stays a gate."""

    def means(first: Value, other: Value) -> Outcome:
        if not first.carries:
            return held(first, other)
        return first.state, function(first.live, other.at)

    return means


def scaled_by(scale: Callable[[Tensor], Tensor]) -> Semantics:
    """A scale made of the tensor itself, which is held: a gate stays a gate."""

    def means(value: Value) -> Outcome:
        return (value.state, value.live * scale(value.at)) if value.carries else held(value)

    return means


def power(value: Value) -> Outcome:
    """The square of an activation is a gate of its own, any other square is held."""
    if value.state is not State.GATE:
        return held(value)
    return State.GATE, value.live * value.at


def glu(a: Value, b: Value) -> Outcome:
    """a * sigmoid(b) out of one tensor: the part that is gated carries."""
    if not (a.carries or b.carries) or State.OPERATOR in (a.state, b.state):
        return held(a, b)
    return State.CARRIER, a.live * b.at.sigmoid()


def self_gated(value: Value) -> Outcome:
    """a * sigmoid(a): an operator scales the carrier."""
    return (value.state, value.live * value.at.sigmoid()) if value.carries else held(value)


def swiglu(a: Value, b: Value) -> Outcome:
    """silu(a) * b, of which b carries; where b is a gate as well, neither does."""
    if not b.carries:
        gate = activation(F.silu, 0.5)(a)
        return (gate[0], gate[1] * b.at) if a.carries and gate[1] is not None else held(a, b)  # type: ignore[operator]
    if b.state is State.GATE and a.carries:
        return held(a, b)
    return b.state, F.silu(a.at) * b.live


def branch(a: Value, b: Value) -> Outcome:
    """A decision that depends on the image is held, as a mask is."""
    if not a.carries:
        return held(a)
    return a.state, a.live * (2.0 if float(b.at.sum()) > 0 else 3.0)


def relu_of_sum(a: Value, b: Value) -> Outcome:
    """In place: the second line sees what the first one wrote."""
    state, live = total(torch.add)(a, b)
    return selection(F.relu)(Value(state, a.at + b.at, live)) if live is not None else held(a, b)


def rows_replaced(a: Value, b: Value) -> Outcome:
    """The first row of b takes the place of a's."""
    return total(lambda a, b: torch.cat([b[:, :1], a[:, 1:]], 1))(a, b)


def half_scaled(a: Value, b: Value) -> Outcome:
    """A product in part of a tensor: what is not held of the part is of the whole."""
    state, live = product(torch.mul)(part(a), part(b))
    if not a.depends and not b.depends:
        return State.CONSTANT, None
    if live is None or not (a.carries or not a.depends):
        return State.OPERATOR, None
    rest = a.live[:, 2:]
    gate = state is State.GATE and a.state is State.GATE
    return (State.GATE if gate else State.CARRIER), torch.cat([live, rest], 1)


def part(value: Value) -> Value:
    return Value(value.state, value.at[:, :2], value.live[:, :2])


def centred(live: Tensor, at: Tensor) -> Tensor:
    inverse = (at.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    return (live - live.mean(-1, keepdim=True)) * inverse


def rms(at: Tensor) -> Tensor:
    return (at.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def unit(live: Tensor, at: Tensor) -> Tensor:
    return live / at.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, heads: int = 1) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores + mask.unsqueeze(1)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def multi_head(a: Value) -> Outcome:
    """Attention with projections of its own: only the values carry."""
    if not a.carries:
        return held(a)
    q, k = (F.linear(a.at, w, bias) for w, bias in zip(QKV[:2], QKV_BIAS[:2], strict=True))
    return State.CARRIER, F.linear(attend(q, k, F.linear(a.live, QKV[2], QKV_BIAS[2]), heads=2), W, BIAS)


def affine(x: Tensor) -> Tensor:
    return F.linear(x, W, BIAS)


def convolved(x: Tensor) -> Tensor:
    return F.conv1d(x.mT, KERNEL, BIAS, padding=1).mT


def of_constant(function: Callable[[Tensor, Tensor], Tensor]) -> Semantics:
    """Affine in the first argument; nothing says how the second one changes the result, so it must be constant."""

    def means(a: Value, b: Value) -> Outcome:
        return held(a, b) if b.depends else total(lambda a: function(a, b.at))(a)

    return means


def copied(a: Value, b: Value) -> Outcome:
    """Of the first only the shape counts; the second keeps its state."""
    return move(lambda x: x)(b)


def copied_and_held(a: Value, b: Value) -> Outcome:
    """Of the first only the shape counts; the second is detached."""
    return held(b)


def shifted_norm(a: Value, b: Value) -> Outcome:
    """A norm whose bias is made of the second argument."""
    return held(a, b) if b.depends else first_carries(lambda x, at: centred(x, at) + b.at[0, 0])(a)
