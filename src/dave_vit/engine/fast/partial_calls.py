"""Which slices of its arguments a slice of a call's result needs: one rule for each kind of torch function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.fast.recording import WHOLE, RecordedCall, Recording, Region, TensorRef


def plan_partial_call(recording: Recording, call: RecordedCall, ref: TensorRef) -> RecordedCall | None:
    """Return the call that computes a slice of one output, or None where the call must be made as a whole."""
    if call.name in _SELECTORS:
        return _select(recording, call, ref)
    if ref.region == WHOLE or call.name not in _RULES:
        return None
    return _RULES[call.name](recording, call, ref.region)


def _region(spans: dict[int, tuple[int, int]]) -> Region:
    return tuple((dim, *span) for dim, span in sorted(spans.items()))


def _slice_argument(value: Any, region: Region) -> Any:
    """Slice an argument: a tensor of the recording later, a constant now."""
    if isinstance(value, TensorRef):
        return value._replace(region=region)
    for dim, start, length in region:
        value = value.detach().narrow(dim, start, length)
    return value


_WHOLE_WEIGHT = "_dave_whole"


def _slice_weight(weight: Tensor, rows: Region) -> Tensor:
    """Slice a weight by outputs; what is computed of the whole of it stays possible."""
    part: Tensor = _slice_argument(weight, rows)
    for _, start, length in rows:
        setattr(part, _WHOLE_WEIGHT, (weight.detach(), slice(start, start + length)))
    return part


def whole_weight(weight: Tensor) -> tuple[Tensor, slice]:
    """Return the weight that one was sliced out of, and which outputs it has of it."""
    return getattr(weight, _WHOLE_WEIGHT, (weight, slice(None)))


def _elementwise(recording: Recording, call: RecordedCall, region: Region) -> RecordedCall | None:
    """Slice the arguments like the result, but for dimensions in which they are broadcast."""
    rank = len(call.shapes[0])
    if len(call.shapes) > 1 or any(isinstance(value, TensorRef | Tensor) for value in call.kwargs.values()):
        return None

    def slice_argument(value: Any) -> Any:
        if not isinstance(value, TensorRef | Tensor):
            return value
        shape = recording.shape(value) if isinstance(value, TensorRef) else value.shape
        own = ((dim - rank + len(shape), start, length) for dim, start, length in region)
        return _slice_argument(value, tuple(span for span in own if span[0] >= 0 and shape[span[0]] != 1))

    return replace(call, args=tuple(slice_argument(value) for value in call.args))


def _normalize(recording: Recording, call: RecordedCall, region: Region) -> RecordedCall | None:
    """Layer and RMS norms act on the last dimensions of each token alone."""
    kept = len(call.shapes[0]) - len(tuple(call.args[1]))
    if any(dim >= kept for dim, _, _ in region) or not isinstance(call.args[0], TensorRef):
        return None
    return replace(call, args=(call.args[0]._replace(region=region), *call.args[1:]))


def _linear(recording: Recording, call: RecordedCall, region: Region) -> RecordedCall | None:
    """Some outputs need some rows of the weight, some tokens need those tokens."""
    arguments = dict(zip(("input", "weight", "bias"), call.args, strict=False)) | call.kwargs
    weight, bias = arguments["weight"], arguments.get("bias")
    if not isinstance(weight, Tensor) or isinstance(bias, TensorRef) or not isinstance(arguments["input"], TensorRef):
        return None
    last = len(call.shapes[0]) - 1
    rows = tuple((0, start, length) for dim, start, length in region if dim == last)
    tokens = tuple(span for span in region if span[0] != last)
    bias = None if bias is None else _slice_argument(bias, rows)
    args = (arguments["input"]._replace(region=tokens), _slice_weight(weight, rows), bias)
    return replace(call, args=args, kwargs={})


def _attention(recording: Recording, call: RecordedCall, region: Region) -> RecordedCall | None:
    """Some queries attend to all keys."""
    query, *others = call.args
    token = len(call.shapes[0]) - 2
    plain = len(others) == 2 or (others[2] is None and not any(others[3:]))
    kwargs = {key: value for key, value in call.kwargs.items() if value is not None}
    plain = plain and "attn_mask" not in kwargs and not kwargs.get("is_causal")
    if not plain or [span[0] for span in region] != [token]:
        return None
    return replace(call, args=(query._replace(region=region), *others), kwargs=kwargs)


def _reshape(recording: Recording, call: RecordedCall, region: Region) -> RecordedCall | None:
    """A dimension that is kept, split from its outermost part on, or merged in whole steps."""
    source, result = recording.shape(call.args[0]), call.shapes[0]
    spans, shape = {}, list(result)
    for dim, start, length in region:
        span = _source_span(source, result, dim, start, length)
        if span is None or span[0] in spans:
            return None
        spans[span[0]] = span[1:]
        shape[dim] = length
    return _replace_move(call, torch.reshape, _region(spans), tuple(shape))


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


def _permute(recording: Recording, call: RecordedCall, region: Region) -> RecordedCall | None:
    order = _order(call, len(call.shapes[0]))
    spans = {order[dim]: (start, length) for dim, start, length in region}
    return _replace_move(call, torch.permute, _region(spans), order)


def _order(call: RecordedCall, rank: int) -> tuple[int, ...]:
    """Return which dimension of its argument each dimension of the result is."""
    dims = call.args[1:] or tuple(call.kwargs.values())
    if call.name == "permute":
        dims = tuple(dims[0]) if isinstance(dims[0], list | tuple) else dims
        return tuple(int(dim) % rank for dim in dims)
    order = list(range(rank))
    first, second = (int(dim) % rank for dim in dims)
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def _select(recording: Recording, call: RecordedCall, ref: TensorRef) -> RecordedCall | None:
    """A slice of a selection is a slice of its source."""
    source = call.args[0]
    if not isinstance(source, TensorRef):
        return None
    selection = _SELECTORS[call.name](recording.shape(source), call, ref.output)
    if selection is None:
        return None
    spans, dropped = selection
    kept = [dim for dim in range(len(recording.shape(source))) if dim not in dropped]
    for dim, start, length in ref.region:
        first = spans.get(kept[dim], (0, 0))[0]
        spans[kept[dim]] = (first + start, length)
    return _replace_move(call, torch.squeeze, _region(spans), tuple(dropped))


def _replace_move(call: RecordedCall, func: Callable[..., Any], region: Region, shape: tuple[int, ...]) -> RecordedCall:
    """Return another way to move a slice of a call's first argument."""
    return replace(call, func=func, args=(call.args[0]._replace(region=region), shape), kwargs={})


Selection = tuple[dict[int, tuple[int, int]], list[int]]
"""Spans by dimension, and the dimensions that are dropped."""


def _item(shape: tuple[int, ...], call: RecordedCall, output: int) -> Selection | None:
    """Basic indexing with integers and slices."""
    index = call.args[1] if type(call.args[1]) is tuple else (call.args[1],)
    if any(isinstance(entry, bool) or not isinstance(entry, int | slice | type(...)) for entry in index):
        return None
    if ... in index:
        at = index.index(...)
        index = index[:at] + (slice(None),) * (len(shape) - len(index) + 1) + index[at + 1 :]
    dropped = [dim for dim, entry in enumerate(index) if isinstance(entry, int)]
    spans = {dim: (index[dim] % shape[dim], 1) for dim in dropped}
    for dim, entry in enumerate(index):
        if dim in dropped:
            continue
        start, stop, step = entry.indices(shape[dim])
        if step != 1:
            return None
        if (start, stop) != (0, shape[dim]):
            spans[dim] = (start, max(0, stop - start))
    return spans, dropped


def _unbind(shape: tuple[int, ...], call: RecordedCall, output: int) -> Selection:
    dim = int((call.args[1:] or tuple(call.kwargs.values()) or (0,))[0]) % len(shape)
    return {dim: (output, 1)}, [dim]


def _chunk(shape: tuple[int, ...], call: RecordedCall, output: int) -> Selection | None:
    """Parts along one dimension, in order; their sizes say which one."""
    dim = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else 0) % len(shape)
    sizes = [part[dim] for part in call.shapes]
    return {dim: (sum(sizes[:output]), sizes[output])}, []


_SELECTORS: dict[str, Callable[[tuple[int, ...], RecordedCall, int], Selection | None]] = {
    "__getitem__": _item,
    "unbind": _unbind,
    "chunk": _chunk,
    "split": _chunk,
}


_RULES: dict[str, Callable[[Recording, RecordedCall, Region], RecordedCall | None]] = {
    **dict.fromkeys(
        "add sub mul div neg gelu silu relu tanh sigmoid hardswish dropout contiguous clone".split(), _elementwise
    ),
    **dict.fromkeys("reshape view flatten unflatten".split(), _reshape),
    **dict.fromkeys("permute transpose swapaxes".split(), _permute),
    **dict.fromkeys(["layer_norm", "rms_norm"], _normalize),
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
}
