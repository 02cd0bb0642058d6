"""Rules for functions that are linear already, at least piece by piece: they only keep the states of tensors."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.calls import Call
from dave_vit.engine.states import State, depends_on_input, is_carrier, map_tensors, mark, state_of, sum_state, tensors
from dave_vit.errors import training_error


def affine(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Ordinary derivative; the constant is what is left when all carriers are zero."""
    value = call.func(*args, **kwargs)
    if not isinstance(value, Tensor):
        return value
    return call.mode.record_constant(value, lambda: _compute_constant(call, args, kwargs), call.name)


def _compute_constant(call: Call, args: Any, kwargs: Any) -> Any:
    """Call a function with all carriers zero; of a linear layer the result is its bias."""
    if call.name == "linear" and len(args) > 1 and not args[1].requires_grad:
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return None if bias is None else _zero_carriers(bias)
    if call.name in ("add", "sub") and all(isinstance(term, Tensor) and term.requires_grad for term in args):
        return None  # as the two terms of a residual connection
    return call.func(*_zero_carriers(args), **_zero_carriers(kwargs))


def _zero_carriers(value: Any) -> Any:
    return map_tensors(lambda t: torch.zeros_like(t) if t.requires_grad else t, value)


def move(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Rearranging and casting: a gate stays a gate."""
    value = reduce(call, *args, **kwargs)
    return mark(value, state_of(args[0])) if args and is_carrier(args[0]) else value


def reduce(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Sums and means: linear in the first argument, whose numbers are mixed with each other."""
    if not args or not is_carrier(args[0]):
        return freeze(call, *args, **kwargs)
    return call.func(args[0], *map_tensors(Tensor.detach, args[1:]), **map_tensors(Tensor.detach, kwargs))


def add(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Sums and concatenations of several tensors; the mask or index that places them is no term."""
    index = 1 if call.func is Tensor.where else call.operator.index_argument  # x.where(mask, y)
    terms = [term for position, term in enumerate(args) if position != index]
    named = {name: term for name, term in kwargs.items() if name not in ("condition", "mask", "index", "indices")}
    state = sum_state(state_of(term) for term in tensors((terms, named)))
    if state is State.OPERATOR:
        return freeze(call, *args, **kwargs)
    return mark(affine(call, *args, **kwargs), state)


def scatter(call: Call, *args: Any, reduce: str | None = None, **kwargs: Any) -> Any:
    """``scatter``, which with ``reduce`` adds to what is there or multiplies it."""
    if reduce is None:
        return add(call, *args, **kwargs)
    source = args[3] if len(args) > 3 else kwargs.get("src")
    if reduce != "add" or not isinstance(source, Tensor):
        raise call.mode.refusal(f"scatter(reduce={reduce!r})")
    return add(Call(call.mode, torch.scatter_add, "scatter_add"), *args, **kwargs)


def scatter_reduce(call: Call, *args: Any, **kwargs: Any) -> Any:
    """``scatter_reduce``: sums and means of terms are linear, products and extremes are not."""
    reduction = kwargs.get("reduce", args[4] if len(args) > 4 else "")
    return (add if reduction in ("sum", "mean") else freeze)(call, *args, **kwargs)


def select(call: Call, *args: Any, **kwargs: Any) -> Any:
    """ReLU, max-pool, abs: piecewise linear, so the ordinary derivative is the effective one."""
    others = [t for t in tensors((args[1:], kwargs)) if t.is_floating_point()]
    if others and (call.name != "prelu" or is_carrier(others[0])):  # max(x, y) is not homogeneous in x
        return freeze(call, *args, **kwargs)
    return mark(call.func(*args, **kwargs), State.GATE)


def ordinary(call: Call, *args: Any, **kwargs: Any) -> Any:
    """The function's own derivative."""
    return call.func(*args, **kwargs)


def freeze(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Functions that can only be part of an operator: without gradient, the result is one from here on."""
    call.mode.losses.append(f"{call.name}{call.mode.location()}")
    return call.func(*map_tensors(Tensor.detach, args), **map_tensors(Tensor.detach, kwargs))


def set_item(call: Call, target: Tensor, index: Any, value: Any) -> None:
    """Assignment to a slice, in place by nature: a sum of what stays and what comes."""
    state = sum_state([state_of(target), state_of(value)])
    if state is State.OPERATOR:
        if target._is_view():
            raise call.mode.refusal("assigning an input-dependent operator to a slice of a view")
        call.mode.freeze(target)
        call.func(target, *map_tensors(Tensor.detach, (index, value)))
        call.mode.update_state(target, State.OPERATOR)
        return
    constant = _zero_carriers(target).clone()
    constant[index] = _zero_carriers(value)
    call.func(target, index, value)
    recorded = call.mode.record_constant(target, lambda: constant, call.name)
    if recorded is not target:
        target.copy_(recorded)
    call.mode.update_state(target, state)


def copy_into(call: Call, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001
    """``target.copy_(source)`` as a value: the source in the target's shape and type."""
    if depends_on_input(source):
        return mark(source.to(target.dtype).expand_as(target), state_of(source))
    everywhere = Call(call.mode, partial(torch.where, torch.ones_like(target, dtype=torch.bool)), "where")
    return affine(everywhere, source.to(target.dtype), target)  # type: ignore[no-any-return]


def fill(call: Call, target: Tensor, value: Any = 0) -> Tensor:
    """``target.fill_(value)`` and ``target.zero_()``: nothing of the target is left."""
    return copy_into(call, target, torch.as_tensor(value, dtype=target.dtype, device=target.device))


def iterate(call: Call, tensor: Tensor) -> Any:
    """Looping over a tensor: the parts keep the state of the whole."""
    return iter(move(Call(call.mode, Tensor.unbind, "unbind"), tensor))


def solve(call: Call, system: Tensor, right: Tensor, **kwargs: Any) -> Any:
    """The solution X of A X = B: linear in B, with A frozen."""
    if not is_carrier(right):
        return freeze(call, system, right, **kwargs)
    return mark(call.func(system.detach(), right, **kwargs), State.CARRIER)


def mean_and_spread(call: Call, *args: Any, **kwargs: Any) -> Any:
    """``var_mean`` and ``std_mean``: the spread is an operator, the mean carries."""
    spread, mean = call.func(*args, **kwargs)
    return spread.detach(), mean


def dropout(call: Call, input: Tensor, p: float = 0.5, training: bool = True, **kwargs: Any) -> Tensor:  # noqa: FBT001
    """The identity in evaluation mode; at random in training mode, which no map can explain."""
    if training and p > 0.0:
        raise training_error("dropout" + call.mode.location())
    return input


def linear_combination(call: Call, start: Tensor, end: Tensor, weight: Any) -> Any:
    """``lerp``: linear in both ends for a constant weight."""
    state = sum_state([state_of(start), state_of(end)])
    if depends_on_input(weight) or state is State.OPERATOR:
        return freeze(call, start, end, weight)
    return mark(affine(call, start, end, weight), state)


def difference(
    call: Call, input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Any:
    """``diff``: linear in the whole, of which its ends are parts."""
    parts = [part for part in (prepend, input, append) if part is not None]
    if len(parts) == 1:
        return reduce(call, input, n, dim)
    with call.mode:
        return torch.diff(torch.cat(parts, dim), n, dim)
