"""Check that W is the derivative with all operators held: replay the model for another image with recorded operators.

While the model runs with an image x, every tensor that depends on the image gets a companion: its value for the image
x + d, with all operators as they are for x. Companions are computed by torch's own functions and by independent
formulas, never by the rules. With operators held the score is affine in the image, so s(x + d) - s(x) = <W, d>.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import place_tensors
from dave_vit.engine.forward import Read, forward, isolate_pass
from dave_vit.engine.interception import Interception, find_out_of_place
from dave_vit.engine.operators import FunctionName, OperatorKind, function_name, names_of_kind
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.engine.rules.norms import INSTANCE_NORM
from dave_vit.engine.states import State, is_carrier, map_tensors, mark, state_of, tensors

_LIVE = "_dave_companion"


class ReplayError(Exception):
    """A function of the image has no held form, so the model cannot be replayed."""


def replay(model: nn.Module, inputs: Tensor, other: Tensor, read: Read) -> Tensor:
    """Return the model's logits for ``other``, with all operators as they are for ``inputs``.

    Raises:
        ReplayError: a function of the image has no held form.
    """
    mode = _CompanionInterception(model, other)
    with isolate_pass(inputs):
        _, output = forward(model, inputs, mode, None, read)
    return _companion(output)


def _companion(tensor: Tensor) -> Tensor:
    if not hasattr(tensor, _LIVE):
        raise ReplayError("a tensor that carries the image was made where it could not be followed")
    return getattr(tensor, _LIVE)  # type: ignore[no-any-return]


def _carries(tensor: Tensor) -> bool:
    return tensor.requires_grad and not tensor.is_leaf  # a leaf is a parameter


def _at(value: Any) -> Any:
    """Return arguments as they are for x."""
    return map_tensors(Tensor.detach, value)


def _live(value: Any) -> Any:
    """Return the companions of arguments."""
    return map_tensors(lambda tensor: _companion(tensor) if _carries(tensor) else tensor.detach(), value)


def _factors(value: Any) -> Any:
    """Return the companions of the factors of a product: gates are held where a plain carrier is among them."""
    states = [state_of(tensor) for tensor in tensors(value) if _carries(tensor)]
    is_held = State.CARRIER in states
    return map_tensors(lambda t: _at(t) if is_held and state_of(t) is State.GATE else _live(t), value)


class _CompanionInterception(Interception):
    """An interception that computes a companion for every carrier; ``other`` is that of the input."""

    def __init__(self, model: nn.Module, other: Tensor) -> None:
        super().__init__(EFFECTIVE, model)
        self._other = other.detach().clone()

    def enter(self, inputs: Tensor) -> Tensor:
        """Declare the input and its companion."""
        setattr(inputs, _LIVE, self._other)
        return super().enter(inputs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call, then its held form on the companions."""
        spelling, (args, kwargs) = function_name(func), place_tensors(func, args, kwargs or {})
        if spelling.operator.has_constant_result or not any(map(is_carrier, tensors((args, kwargs)))):
            return super().__torch_function__(func, types, args, kwargs)
        writes = spelling.inplace or spelling.name == "__setitem__" or bool(kwargs.get("inplace"))
        given: Any = (args, {key: value for key, value in kwargs.items() if key != "inplace"})
        if writes:
            given = map_tensors(partial(_copy_written, target=args[0]), given)
        result = super().__torch_function__(func, types, args, kwargs)
        result = list(result) if spelling.name == "__iter__" else result
        with torch.no_grad():
            if writes:
                self._write(spelling, func, args[0], *given)
            else:
                self._make(spelling.name, func, result, *given)
        return iter(result) if spelling.name == "__iter__" else result

    def _make(self, name: str, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        outputs = tensors(result)
        if all(hasattr(tensor, _LIVE) for tensor in outputs if tensor.requires_grad):
            return  # an operator, or a function whose parts were followed one by one
        for tensor, live in zip(outputs, tensors(_replay_call(name, func, args, kwargs)), strict=True):
            if tensor.requires_grad:
                setattr(tensor, _LIVE, live)

    def _write(self, spelling: FunctionName, func: Any, target: Tensor, args: Any, kwargs: Any) -> None:
        """Write into the companion itself, so that its views change as those of the tensor do."""
        if not target.requires_grad:
            return
        live = getattr(target, _LIVE, args[0].detach())
        if spelling.name == "__setitem__":
            live[_at(args[1])] = _live(args[2])
        elif spelling.operator.kind is OperatorKind.MOVE:  # may change the shape
            func(live, *args[1:], **kwargs)
        else:
            plain = find_out_of_place(func) if spelling.inplace else func
            live.copy_(tensors(_replay_call(spelling.name, plain, args, kwargs))[0])
        setattr(target, _LIVE, live)


def _copy_written(tensor: Tensor, target: Tensor) -> Tensor:
    """Return what a call is about to write to as it is before."""
    if tensor is not target:
        return tensor
    before = mark(tensor.clone(), state_of(tensor))
    if _carries(tensor):
        setattr(before, _LIVE, _companion(tensor).clone())
    return before


def _replay_call(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run one function with its operators held."""
    if name not in _FORMS:
        raise ReplayError(name)
    if name == "view" and not isinstance(args[1], torch.dtype):  # companions may be laid out in another way
        func = Tensor.reshape
    return _FORMS[name](func, *args, **kwargs)


def _take(*ways: Callable[[Any], Any], rest: Callable[[Any], Any] = _at) -> Callable[..., Any]:
    """Return the form of a function that is called with its first arguments, and the rest, taken in these ways."""

    def form(func: Any, *args: Any, **kwargs: Any) -> Any:
        first = [take(value) for take, value in zip(ways, args, strict=False)]
        return func(*first, *rest(args[len(ways) :]), **rest(kwargs))

    return form


def _weighted_sum(func: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*_factors((input, weight)), *_live(args), **_live(kwargs))


def _selection(func: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
    """Return torch's derivative along the companion: the function is piecewise linear and homogeneous."""

    def select(x: Tensor) -> Any:
        return tuple(tensors(func(x, *_at(args), **_at(kwargs))))

    return _derivative(select, _at(first), _live(first))


def _derivative(function: Callable[[Tensor], Any], at: Tensor, along: Tensor) -> Any:
    """Return torch's derivative in one direction."""
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)  # torch's own call
        return torch.func.jvp(function, (at,), (along,))[1]


def _gate(func: Any, input: Any, *args: Any, **kwargs: Any) -> Tensor:
    """f(x) = x phi(x): the quotient, and its limit, the slope, at zero."""
    at = _at(input)

    def activation(x: Tensor) -> Any:
        return func(x, *args, **kwargs)

    slope = _derivative(activation, torch.zeros_like(at), torch.ones_like(at))
    gate = torch.where(at == 0, slope, activation(at) / torch.where(at == 0, torch.ones_like(at), at))
    return gate * _live(input)  # type: ignore[no-any-return]


def _layer_norm(func: Any, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    return _center(_live(x), _at(x), tuple(range(-len(tuple(shape)), 0)), eps, weight, bias)


def _rms_norm(func: Any, x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    at, dims = _at(x), tuple(range(-len(tuple(shape)), 0))
    floor = torch.finfo(at.dtype).eps if eps is None else eps
    value = _live(x) / (at.square().mean(dims, keepdim=True) + floor).sqrt()
    return value if weight is None else value * weight.detach()


def _group_norm(func: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: Any = 1e-5, *_: Any) -> Any:
    live, at = (part.unflatten(1, (groups, -1)) for part in (_live(x), _at(x)))
    shape = (*live.shape[1:3], *[1] * (x.ndim - 2))
    parameters = (None if part is None else part.reshape(shape) for part in (weight, bias))
    return _center(live, at, tuple(range(2, live.ndim)), eps, *parameters).reshape(x.shape)


def _instance_norm(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(INSTANCE_NORM, args, strict=False)) | kwargs
    return _group_norm(func, x, x.shape[1], given.get("weight"), given.get("bias"), given.get("eps", 1e-5))


def _center(live: Tensor, at: Tensor, dims: tuple[int, ...], eps: float, weight: Any, bias: Any) -> Tensor:
    """Subtract the companion's own mean, divide by the spread that is held, scale and shift."""
    value = (live - live.mean(dims, keepdim=True)) / (at.var(dims, unbiased=False, keepdim=True) + eps).sqrt()
    value = value if weight is None else value * weight.detach()
    return value if bias is None else value + bias.detach()


def _normalize(func: Any, x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any) -> Any:
    return _live(x) / _at(x).norm(p, dim, keepdim=True).clamp_min(eps)


def _mean_and_spread(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*_at(args), **_at(kwargs))[0], func(*_live(args), **_live(kwargs))[1]


_FORMS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(names_of_kind(OperatorKind.MOVE, OperatorKind.REDUCTION, OperatorKind.TRANSFORM), _take(_live)),
    **dict.fromkeys([*names_of_kind(OperatorKind.SUM), "lerp", "batch_norm"], _take(rest=_live)),
    **dict.fromkeys(names_of_kind(OperatorKind.PRODUCT), _take(rest=_factors)),
    **dict.fromkeys(names_of_kind(OperatorKind.WEIGHTED), _weighted_sum),
    **dict.fromkeys(names_of_kind(OperatorKind.FUSED_PRODUCT), _take(_live, rest=_factors)),
    **dict.fromkeys(names_of_kind(OperatorKind.SELECTION), _selection),
    **dict.fromkeys(names_of_kind(OperatorKind.DROPOUT), lambda func, x, *_, **__: _live(x)),
    **dict.fromkeys(names_of_kind(OperatorKind.ACTIVATION), _gate),
    **dict.fromkeys(["pow", "square"], lambda func, x, power=2: _at(x) ** (power - 1) * _live(x)),
    **dict.fromkeys(["var_mean", "std_mean"], _mean_and_spread),
    **dict.fromkeys(["linalg_solve", "linalg_solve_triangular"], _take(_at, _live)),
    **dict.fromkeys(["div", "diff"], _take(_live)),
    "glu": lambda func, x, dim=-1: _live(x).chunk(2, dim)[0] * _at(x).chunk(2, dim)[1].sigmoid(),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "normalize": _normalize,
    "scaled_dot_product_attention": _take(_at, _at, _live),  # linear in its values
    "copy": lambda func, target, source, *_: _live(source).to(target.dtype).expand_as(target),
    "__iter__": lambda func, x: list(_live(x).unbind()),
}
