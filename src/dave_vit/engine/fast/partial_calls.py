"""Which parts of its arguments a part of a call's result needs: one rule for each kind of torch function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.fast.recording import Recorded, Ref, Tape, map_refs

Box = tuple[tuple[int, int, int], ...]
"""What is wanted of a tensor: (dimension, start, length) for each dimension that is not wanted whole, in order."""

WHOLE: Box = ()


@dataclass(frozen=True)
class Want:
    """A part of a tensor of the tape, as an argument."""

    ref: Ref
    box: Box = WHOLE


@dataclass(frozen=True)
class Plan:
    """How one output of a call is computed for one box; the arguments hold wants."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int = 0


def part(tape: Tape, call: Recorded, output: int, box: Box) -> Plan | None:
    """How a part of one output of a call is computed, or None where the call must be made as a whole."""
    if call.name in _SELECTORS:
        return _selected(tape, call, output, box)
    if box == WHOLE or call.name not in _RULES:
        return None
    return _RULES[call.name](tape, call, box)


def _box(spans: dict[int, tuple[int, int]]) -> Box:
    return tuple((dim, *span) for dim, span in sorted(spans.items()))


def _shape(tape: Tape, value: Any) -> tuple[int, ...]:
    return tape.shape(value) if isinstance(value, Ref) else tuple(value.shape)


def _cut(value: Any, box: Box) -> Any:
    """A part of an argument: wanted of the tape, or cut out of a constant here and now."""
    if isinstance(value, Ref):
        return Want(value, box)
    for dim, start, length in box:
        value = value.detach().narrow(dim, start, length)
    return value


def _elementwise(tape: Tape, call: Recorded, box: Box) -> Plan | None:
    """Arguments are cut like the result, but for dimensions in which they are broadcast."""
    rank = len(call.shapes[0])
    if len(call.shapes) > 1 or any(isinstance(value, Ref | Tensor) for value in call.kwargs.values()):
        return None

    def cut(value: Any) -> Any:
        if not isinstance(value, Ref | Tensor):
            return value
        shape = _shape(tape, value)
        own = ((dim - rank + len(shape), start, length) for dim, start, length in box)
        return _cut(value, tuple(span for span in own if span[0] >= 0 and shape[span[0]] != 1))

    return Plan(call.func, tuple(cut(value) for value in call.args), call.kwargs)


def _normalised(tape: Tape, call: Recorded, box: Box) -> Plan | None:
    """Layer and RMS norms act on the last dimensions of each token."""
    kept = len(call.shapes[0]) - len(tuple(call.args[1]))
    if any(dim >= kept for dim, _, _ in box) or not isinstance(call.args[0], Ref):
        return None
    args, kwargs = map_refs(Want, (call.args[1:], call.kwargs))
    return Plan(call.func, (Want(call.args[0], box), *args), kwargs)


def _linear(tape: Tape, call: Recorded, box: Box) -> Plan | None:
    """Some outputs need some rows of the weight, some tokens need those tokens."""
    given = dict(zip(("input", "weight", "bias"), call.args, strict=False)) | call.kwargs
    weight, bias = given["weight"], given.get("bias")
    if not isinstance(weight, Tensor) or isinstance(bias, Ref) or not isinstance(given["input"], Ref):
        return None
    last = len(call.shapes[0]) - 1
    rows = tuple((0, start, length) for dim, start, length in box if dim == last)
    tokens = tuple(span for span in box if span[0] != last)
    bias = None if bias is None else _cut(bias, rows)
    return Plan(call.func, (Want(given["input"], tokens), _cut(weight, rows), bias), {})


def _attention(tape: Tape, call: Recorded, box: Box) -> Plan | None:
    """Some queries look at all keys."""
    query, *others = call.args
    token = len(call.shapes[0]) - 2
    plain = len(others) == 2 or (others[2] is None and not any(others[3:]))
    kwargs = {key: value for key, value in call.kwargs.items() if value is not None}
    plain = plain and "attn_mask" not in kwargs and not kwargs.get("is_causal")
    if not plain or [span[0] for span in box] != [token]:
        return None
    return Plan(call.func, (Want(query, box), *map_refs(Want, others)), kwargs)


def _reshaped(tape: Tape, call: Recorded, box: Box) -> Plan | None:
    """A dimension that is kept, split from its outermost part on, or merged in whole steps."""
    source, result = tape.shape(call.args[0]), call.shapes[0]
    spans, shape = {}, list(result)
    for dim, start, length in box:
        found = _source_span(source, result, dim, start, length)
        if found is None or found[0] in spans:
            return None
        spans[found[0]] = found[1:]
        shape[dim] = length
    return Plan(torch.reshape, (Want(call.args[0], _box(spans)), tuple(shape)), {})


def _source_span(
    source: tuple[int, ...], result: tuple[int, ...], dim: int, start: int, length: int
) -> tuple[int, int, int] | None:
    outer = math.prod(result[:dim])
    for place, size in enumerate(source):
        if math.prod(source[:place]) != outer or size == 1 != result[dim]:
            continue
        if size % result[dim] == 0:  # kept or split
            step = size // result[dim]
            return place, start * step, length * step
        inner = result[dim] // size
        merged = result[dim] % size == 0 and start % inner == 0 and length % inner == 0
        return (place, start // inner, length // inner) if merged else None
    return None


def _permuted(tape: Tape, call: Recorded, box: Box) -> Plan | None:
    order = _order(call, len(call.shapes[0]))
    spans = {order[dim]: (start, length) for dim, start, length in box}
    return Plan(torch.permute, (Want(call.args[0], _box(spans)), order), {})


def _order(call: Recorded, rank: int) -> tuple[int, ...]:
    """Which dimension of its argument each dimension of the result is."""
    dims = call.args[1:] or tuple(call.kwargs.values())
    if call.name == "permute":
        dims = tuple(dims[0]) if isinstance(dims[0], list | tuple) else dims
        return tuple(int(dim) % rank for dim in dims)
    order = list(range(rank))
    first, second = (int(dim) % rank for dim in dims)
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def _selected(tape: Tape, call: Recorded, output: int, box: Box) -> Plan | None:
    """A part of what is selected is a part of what it is selected from."""
    source = call.args[0]
    if not isinstance(source, Ref):
        return None
    picked = _SELECTORS[call.name](tape.shape(source), call, output)
    if picked is None:
        return None
    spans, gone = picked
    kept = [dim for dim in range(len(tape.shape(source))) if dim not in gone]
    for dim, start, length in box:
        first = spans.get(kept[dim], (0, 0))[0]
        spans[kept[dim]] = (first + start, length)
    return Plan(torch.squeeze, (Want(source, _box(spans)), tuple(gone)), {})


Picked = tuple[dict[int, tuple[int, int]], list[int]]
"""Spans by dimension, and the dimensions that are dropped."""


def _item(shape: tuple[int, ...], call: Recorded, output: int) -> Picked | None:
    """Basic indexing with integers and slices."""
    index = call.args[1] if type(call.args[1]) is tuple else (call.args[1],)
    if any(isinstance(entry, bool) or not isinstance(entry, int | slice | type(...)) for entry in index):
        return None
    if ... in index:
        at = index.index(...)
        index = index[:at] + (slice(None),) * (len(shape) - len(index) + 1) + index[at + 1 :]
    spans: dict[int, tuple[int, int]] = {}
    gone = [dim for dim, entry in enumerate(index) if isinstance(entry, int)]
    for dim, entry in enumerate(index):
        if isinstance(entry, int):
            spans[dim] = (entry % shape[dim], 1)
            continue
        start, stop, step = entry.indices(shape[dim])
        if step != 1:
            return None
        if (start, stop) != (0, shape[dim]):
            spans[dim] = (start, max(0, stop - start))
    return spans, gone


def _unbound(shape: tuple[int, ...], call: Recorded, output: int) -> Picked:
    dim = int((call.args[1:] or tuple(call.kwargs.values()) or (0,))[0]) % len(shape)
    return {dim: (output, 1)}, [dim]


def _chunked(shape: tuple[int, ...], call: Recorded, output: int) -> Picked | None:
    """Parts along one dimension, in order; which one is seen from their sizes."""
    dim = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else 0) % len(shape)
    sizes = [made[dim] for made in call.shapes]
    return {dim: (sum(sizes[:output]), sizes[output])}, []


_SELECTORS: dict[str, Callable[[tuple[int, ...], Recorded, int], Picked | None]] = {
    "__getitem__": _item,
    "unbind": _unbound,
    "chunk": _chunked,
    "split": _chunked,
}


def _under(rule: Callable[..., Plan | None], names: Iterable[str]) -> dict[str, Callable[..., Plan | None]]:
    return dict.fromkeys(names, rule)


_RULES: dict[str, Callable[[Tape, Recorded, Box], Plan | None]] = {
    **_under(
        _elementwise, "add sub mul div neg gelu silu relu tanh sigmoid hardswish dropout contiguous clone".split()
    ),
    **_under(_reshaped, "reshape view flatten unflatten".split()),
    **_under(_permuted, "permute transpose swapaxes".split()),
    **_under(_normalised, "layer_norm rms_norm".split()),
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
}
