"""Move selections up a recording: what the logits do not need is not computed, forward or backward.

A class token that is picked after the last block needs one row of its MLP and of its queries; queries, keys and values
sliced out of one product need a third of its weight each, and only that of the values is part of the backward pass. A
selection moves up through every call that acts alike on what is selected and on the rest.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.fast.recording import WHOLE, RecordedCall, Recording, Region, TensorRef, find_refs, map_refs
from dave_vit.engine.states import map_tensors, source_of, tensors


def narrow(recording: Recording) -> Recording:
    """Return the recording with every selection moved up as far as possible."""
    return _Rebuilder(recording, _plan_calls(recording)).recording


def _plan_calls(recording: Recording) -> dict[TensorRef, RecordedCall]:
    """Plan the calls from the output backwards: all slices of a result that are needed are known when it is reached."""
    needed: dict[int, set[TensorRef]] = {recording.output.call: {recording.output}}
    planned: dict[TensorRef, RecordedCall] = {}
    for index in reversed(range(len(recording.calls))):
        slices = needed.pop(index, set())
        calls: dict[TensorRef, RecordedCall | None] = {}
        if _are_disjoint(slices):
            calls = {ref: plan_partial_call(recording, recording.calls[index], ref) for ref in slices}
        if None in calls.values() or not calls:  # better made as a whole
            calls = {ref._replace(region=WHOLE): recording.calls[index] for ref in slices}
        planned |= {ref: call for ref, call in calls.items() if call is not None}
        for ref in find_refs([(call.args, call.kwargs) for call in calls.values() if call is not None]):
            needed.setdefault(ref.call, set()).add(ref)
    return planned


def _are_disjoint(slices: set[TensorRef]) -> bool:
    """Return whether no element is in two slices: it would be computed twice."""
    spans = [(ref.output, {dim: (start, start + length) for dim, start, length in ref.region}) for ref in slices]
    return all(
        output != other or any(a[dim][1] <= b[dim][0] or b[dim][1] <= a[dim][0] for dim in a.keys() & b.keys())
        for i, (output, a) in enumerate(spans)
        for other, b in spans[:i]
    )


def _detach_parameter(tensor: Tensor) -> Tensor:
    """Make a parameter a constant, once and not in each pass."""
    return tensor.detach() if tensor.requires_grad and tensor.is_leaf else tensor


class _Rebuilder:
    """Builds a recording out of planned calls, in the order of the old one."""

    def __init__(self, old: Recording, planned: dict[TensorRef, RecordedCall]) -> None:
        self._calls: list[RecordedCall] = []
        self._refs = {TensorRef(-1): TensorRef(-1)}
        whole: dict[int, int] = {}  # calls made as they were: all outputs come from the one new call
        for ref in sorted(planned):
            if planned[ref] is not old.calls[ref.call]:
                self._refs[ref] = self._add(planned[ref])
                continue
            if ref.call not in whole:
                whole[ref.call] = self._add(planned[ref]).call
            self._refs[ref] = TensorRef(whole[ref.call], ref.output)
        self.recording = replace(old, calls=tuple(self._calls), output=self._refs[old.output])

    def _add(self, call: RecordedCall) -> TensorRef:
        args, kwargs = map_tensors(_detach_parameter, map_refs(self._find_slice, (call.args, call.kwargs)))
        self._calls.append(replace(call, args=args, kwargs=kwargs))
        return TensorRef(len(self._calls) - 1)

    def _find_slice(self, ref: TensorRef) -> TensorRef:
        if ref not in self._refs:  # only the whole is there
            part = self._refs[ref._replace(region=WHOLE)]
            for span in ref.region:
                self._calls.append(RecordedCall(torch.narrow, (part, *span), {}))
                part = TensorRef(len(self._calls) - 1)
            self._refs[ref] = part
        return self._refs[ref]


def plan_partial_call(recording: Recording, call: RecordedCall, ref: TensorRef) -> RecordedCall | None:
    """Return the call that computes a slice of one output, or None where the call must be made as a whole."""
    if call.name in ("__getitem__", "unbind", "chunk", "split"):
        return _select(recording, call, ref)
    return None if ref.region == WHOLE or call.name not in _RULES else _RULES[call.name](recording, call, ref)


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
    source = source_of(weight)
    return getattr(source, _WHOLE_WEIGHT, (source, slice(None)))


def _elementwise(recording: Recording, call: RecordedCall, ref: TensorRef) -> RecordedCall | None:
    """Slice the arguments like the result, but for dimensions in which they are broadcast."""
    rank = len(call.shapes[0])
    if len(call.shapes) > 1 or any(isinstance(value, TensorRef | Tensor) for value in call.kwargs.values()):
        return None

    def slice_argument(value: Any) -> Any:
        if not isinstance(value, TensorRef | Tensor):
            return value
        shape = recording.shape(value) if isinstance(value, TensorRef) else value.shape
        own = ((dim - rank + len(shape), start, length) for dim, start, length in ref.region)
        return _slice_argument(value, tuple(span for span in own if span[0] >= 0 and shape[span[0]] != 1))

    return replace(call, args=tuple(slice_argument(value) for value in call.args))


def _normalize(recording: Recording, call: RecordedCall, ref: TensorRef) -> RecordedCall | None:
    """Layer and RMS norms act on the last dimensions of each token alone."""
    kept = len(call.shapes[0]) - len(tuple(call.args[1]))
    if any(dim >= kept for dim, _, _ in ref.region) or not isinstance(call.args[0], TensorRef):
        return None
    return replace(call, args=(call.args[0]._replace(region=ref.region), *call.args[1:]))


def _linear(recording: Recording, call: RecordedCall, ref: TensorRef) -> RecordedCall | None:
    """Some outputs need some rows of the weight, some tokens need those tokens."""
    arguments = dict(zip(("input", "weight", "bias"), call.args, strict=False)) | call.kwargs
    weight, bias = arguments["weight"], arguments.get("bias")
    if not isinstance(weight, Tensor) or isinstance(bias, TensorRef) or not isinstance(arguments["input"], TensorRef):
        return None
    if weight.ndim == 1:  # the outputs are tokens
        return None
    last = len(call.shapes[0]) - 1
    rows = tuple((0, start, length) for dim, start, length in ref.region if dim == last)
    tokens = tuple(span for span in ref.region if span[0] != last)
    bias = None if bias is None else _slice_argument(bias, rows)
    args = (arguments["input"]._replace(region=tokens), _slice_weight(weight, rows), bias)
    return replace(call, args=args, kwargs={})


def _attention(recording: Recording, call: RecordedCall, ref: TensorRef) -> RecordedCall | None:
    """Some queries attend to all keys."""
    query, *others = call.args
    token = len(call.shapes[0]) - 2
    plain = len(others) == 2 or (others[2] is None and not any(others[3:]))
    kwargs = {key: value for key, value in call.kwargs.items() if value is not None}
    plain = plain and "attn_mask" not in kwargs and not kwargs.get("is_causal")
    if not plain or not isinstance(query, TensorRef) or [span[0] for span in ref.region] != [token]:
        return None
    return replace(call, args=(query._replace(region=ref.region), *others), kwargs=kwargs)


def _reshape(recording: Recording, call: RecordedCall, ref: TensorRef) -> RecordedCall | None:
    """A dimension that is kept, split from its outermost part on, or merged in whole steps."""
    if not isinstance(call.args[0], TensorRef):
        return None
    source, result = recording.shape(call.args[0]), call.shapes[0]
    spans, shape = {}, list(result)
    for dim, start, length in ref.region:
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


def _select(recording: Recording, call: RecordedCall, ref: TensorRef) -> RecordedCall | None:
    """A slice of a selection, or of a permutation, is a slice of its source."""
    source = call.args[0]
    if not isinstance(source, TensorRef) or tensors((call.args[1:], call.kwargs)) or find_refs(call.args[1:]):
        return None
    shape = recording.shape(source)
    # A tensor without memory, whose strides name its dimensions: each is larger than all that follow can add up to.
    strides = [2 * math.prod(size + 2 for size in shape[dim + 1 :]) for dim in range(len(shape))]
    probe = torch.empty_strided(shape, strides, device="meta")
    try:
        part = tensors(call.func(probe, *call.args[1:], **call.kwargs))[ref.output]
    except NotImplementedError:  # a list of booleans
        return None
    if part._base is not probe or not set(part.stride()) <= set(strides):  # a copy, a step or a new dimension
        return None
    spans, offset = {}, int(part.storage_offset())
    for dim, stride in enumerate(strides):
        start, offset = divmod(offset, stride)
        spans[dim] = (start, part.shape[part.stride().index(stride)] if stride in part.stride() else 1)
    kept = [strides.index(stride) for stride in part.stride()]
    for dim, start, length in ref.region:
        spans[kept[dim]] = (spans[kept[dim]][0] + start, length)
    chosen = {dim: span for dim, span in spans.items() if span != (0, shape[dim])}
    dropped = tuple(dim for dim in range(len(shape)) if dim not in kept)
    if not dropped:
        return _replace_move(call, torch.permute, _region(chosen), tuple(kept))
    return _replace_move(call, torch.squeeze, _region(chosen), dropped)


def _replace_move(call: RecordedCall, func: Callable[..., Any], region: Region, shape: tuple[int, ...]) -> RecordedCall:
    """Return another way to move a slice of a call's first argument."""
    return replace(call, func=func, args=(call.args[0]._replace(region=region), shape), kwargs={})


_RULES: dict[str, Callable[[Recording, RecordedCall, TensorRef], RecordedCall | None]] = {
    **dict.fromkeys(
        "add sub mul div neg gelu silu relu tanh sigmoid hardswish dropout contiguous clone".split(), _elementwise
    ),
    **dict.fromkeys("reshape view flatten unflatten squeeze unsqueeze".split(), _reshape),
    **dict.fromkeys("permute transpose swapaxes".split(), _select),
    **dict.fromkeys(["layer_norm", "rms_norm"], _normalize),
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
}
