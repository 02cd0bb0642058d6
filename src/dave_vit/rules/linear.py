"""Rules for functions that are linear already: they only need care where two input-dependent tensors meet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dave_vit.errors import TrainingModeError
from dave_vit.intercept.calls import Call
from dave_vit.intercept.states import is_carrier, is_gate, is_operator, map_tensors, mark_gate, tensors
from dave_vit.intercept.surrogate import carry


def affine(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Ordinary derivative; the constant is what is left when all carriers are zero."""
    value = call.func(*args, **kwargs)
    if not isinstance(value, Tensor):
        return value
    return call.mode.with_constant(value, lambda: call.func(*_zeroed(args), **_zeroed(kwargs)), call.name)


def _zeroed(value: Any) -> Any:
    return map_tensors(lambda t: torch.zeros_like(t) if t.requires_grad else t, value)


def move(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Rearranging, casting, summing: linear in the first argument, and a gate stays a gate."""
    if not args or not is_carrier(args[0]):
        return call.mode.operator(call, *args, **kwargs)
    value = call.func(args[0], *map_tensors(Tensor.detach, args[1:]), **map_tensors(Tensor.detach, kwargs))
    if is_gate(args[0]):
        for tensor in tensors(value):
            mark_gate(tensor)
    return value


def total(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Sums and concatenations: an operator among the terms makes the sum an operator."""
    if any(is_operator(t) and t.is_floating_point() for t in tensors((args, kwargs))):
        return call.mode.operator(call, *args, **kwargs)
    value = affine(call, *args, **kwargs)
    carriers = [t for t in tensors((args, kwargs)) if t.requires_grad]
    if len(carriers) == 1 and is_gate(carriers[0]):
        mark_gate(value)
    return value


def product(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Products: operators and constants scale or mix the one carrier.

    Of two carriers, an activation's output is the gate and is frozen (SwiGLU, GEGLU, B-cos); without a gate the product
    is a score such as Q K^T, or a square, and can only become an operator.
    """
    carriers = [t for t in tensors((args, kwargs)) if t.requires_grad]
    gates = [t for t in carriers if is_gate(t)]
    if len(carriers) == 1:
        value = affine(call, *args, **kwargs)
        return mark_gate(value) if gates else value
    if len(carriers) - len(gates) != 1:
        return call.mode.operator(call, *args, **kwargs)
    frozen = {id(t) for t in gates}
    args, kwargs = map_tensors(lambda t: t.detach() if id(t) in frozen else t, (args, kwargs))
    return affine(call, *args, **kwargs)


def quotient(call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Division: the denominator is a scale and is frozen."""
    if rounding_mode is not None or not is_carrier(input):
        return call.mode.operator(call, input, other, rounding_mode=rounding_mode)
    value = call.func(input, other.detach() if isinstance(other, Tensor) else other)
    return mark_gate(value) if is_gate(input) else value


def power(call: Call, input: Any, exponent: Any = 2) -> Any:
    """An activation raised to a power, such as ReLU squared, is a gate of its own; any other power is a scale."""
    if not is_gate(input) or isinstance(exponent, Tensor) or exponent < 1:
        return call.mode.operator(call, input, *([exponent] if call.name == "pow" else []))
    x = input.detach()
    value = x**exponent
    return mark_gate(carry(lambda: value, torch.mul, input, saved=(x ** (exponent - 1),)))


def weighted(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Linear layers and convolutions: the bias is an addend, the weight a constant or an operator."""
    if is_operator(bias) or not (is_carrier(input) or is_carrier(weight)):
        return call.mode.operator(call, input, weight, bias, *args, **kwargs)
    if is_carrier(input) and is_carrier(weight):
        if not is_gate(input) and not is_gate(weight):
            return call.mode.operator(call, input, weight, bias, *args, **kwargs)
        input, weight = (input.detach(), weight) if is_gate(input) else (input, weight.detach())
    return affine(call, input, weight, bias, *args, **kwargs)


def fused_product(call: Call, addend: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> Any:
    """An addend plus a product: attention scores with a mask, scale and shift."""
    if is_operator(addend) or (is_carrier(left) and is_carrier(right)):
        return call.mode.operator(call, addend, left, right, **kwargs)
    if is_carrier(addend) and (is_operator(left) or is_operator(right)) and not (is_carrier(left) or is_carrier(right)):
        return call.mode.operator(call, addend, left, right, **kwargs)
    return affine(call, addend, left, right, **kwargs)


def selection(call: Call, *args: Any, **kwargs: Any) -> Any:
    """ReLU, max-pool, abs: piecewise linear, so the ordinary derivative is the effective one."""
    others = [t for t in tensors((args[1:], kwargs)) if t.is_floating_point()]
    if others and (call.name != "prelu" or is_carrier(others[0])):  # max(x, y) is not homogeneous in x
        return call.mode.operator(call, *args, **kwargs)
    value = call.func(*args, **kwargs)
    for tensor in tensors(value):
        if tensor.requires_grad:
            mark_gate(tensor)
    return value


def frozen(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Functions that can only be part of an operator."""
    return call.mode.operator(call, *args, **kwargs)


def set_item(call: Call, target: Tensor, index: Any, value: Any) -> None:
    """Assignment to a slice, in place by nature."""
    if (is_operator(value) and value.is_floating_point()) or is_operator(target):
        raise call.mode.unsupported("assigning an input-dependent operator to a slice")
    call.func(target, index, value)


def copy_into(call: Call, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001
    """``target.copy_(source)`` as a value: the source in the target's shape and type."""
    return source.to(target.dtype).expand_as(target)


def iterate(call: Call, tensor: Tensor) -> Any:
    """Looping over a tensor: the parts keep what the whole was."""
    return iter(move(Call(call.mode, Tensor.unbind, "unbind"), tensor))


def mean_and_spread(call: Call, *args: Any, **kwargs: Any) -> Any:
    """``var_mean`` and ``std_mean``: the spread is an operator, the mean carries."""
    spread, mean = call.func(*args, **kwargs)
    return spread.detach(), mean


def dropout(call: Call, input: Tensor, p: float = 0.5, training: bool = True, **kwargs: Any) -> Tensor:  # noqa: FBT001
    """The identity in evaluation mode; at random in training mode, which no map can explain."""
    if training and p > 0.0:
        raise training_error("dropout" + call.mode.where())
    return input


def linear_combination(call: Call, start: Tensor, end: Tensor, weight: Any) -> Any:
    """``lerp``: linear in both ends for a constant weight."""
    if is_carrier(weight) or is_operator(start) or is_operator(end) or is_operator(weight):
        return call.mode.operator(call, start, end, weight)
    return affine(call, start, end, weight)


def training_error(what: str) -> TrainingModeError:
    """The error for layers that act at random, or learn, in training mode."""
    return TrainingModeError(f"the model is in training mode and {what} is active; call model.eval() first")


def gated_linear_unit(call: Call, input: Tensor, dim: int = -1) -> Tensor:
    """``F.glu``: a * sigmoid(b), of which b makes the gate."""
    gate = input.detach().chunk(2, dim)[1].sigmoid()
    return carry(
        lambda: call.func(input, dim),
        lambda grad, gate: torch.cat([grad * gate, torch.zeros_like(grad)], dim),
        input,
        saved=(gate,),
    )
