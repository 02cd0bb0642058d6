"""Move selections up a recording: what the logits do not need is not computed, forward or backward.

A class token that is picked after the last block needs one row of its MLP and of its queries; queries, keys and values
sliced out of one product need a third of its weight each, and only that of the values is part of the backward pass. A
selection moves up through every call that acts alike on what is selected and on the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.fast.partial_calls import WHOLE, PartialCall, Region, TensorSlice, plan_partial_call
from dave_vit.engine.fast.recording import RecordedCall, Recording, TensorRef, find_refs, map_refs
from dave_vit.engine.states import map_tensors

_PartialCalls = dict[tuple[TensorRef, Region], PartialCall]


def narrow(recording: Recording) -> Recording:
    """Return the recording with every selection moved up as far as possible."""
    return _Rebuilder(recording, _plan_calls(recording)).recording


def _plan_calls(recording: Recording) -> _PartialCalls:
    """Plan the calls from the output backwards: all regions of a call that are needed are known when it is reached."""
    needed: dict[TensorRef, set[Region]] = {recording.output: {WHOLE}}
    calls_by_region: _PartialCalls = {}
    for index in reversed(range(len(recording.calls))):
        places = (TensorRef(index, output) for output in range(len(recording.calls[index].shapes)))
        regions = {ref: needed[ref] for ref in places if ref in needed}
        planned = _plan_in_parts(recording, regions) or _plan_whole(recording, regions)
        calls_by_region |= planned
        for part in find_refs([(call.args, call.kwargs) for call in planned.values()], TensorSlice):
            needed.setdefault(part.ref, set()).add(part.region)
    return calls_by_region


def _plan_whole(recording: Recording, regions: dict[TensorRef, set[Region]]) -> _PartialCalls:
    calls_by_region = {}
    for ref in regions:
        call = recording.calls[ref.call]
        args, kwargs = map_refs(TensorSlice, (call.args, call.kwargs))
        calls_by_region[ref, WHOLE] = PartialCall(call.func, args, kwargs, ref.output)
    return calls_by_region


def _plan_in_parts(recording: Recording, regions: dict[TensorRef, set[Region]]) -> _PartialCalls | None:
    """Plan a call for each region that is needed of a call, or return None where it is better made as a whole."""
    calls_by_region = {}
    for ref, needed in regions.items():
        if not _are_disjoint(needed):
            return None
        for region in needed:
            call = plan_partial_call(recording, recording.calls[ref.call], ref.output, region)
            if call is None:
                return None
            calls_by_region[ref, region] = call
    return calls_by_region


def _are_disjoint(regions: set[Region]) -> bool:
    """Return whether no element is in two regions: it would be computed twice."""
    spans = [{dim: (start, start + length) for dim, start, length in region} for region in regions]
    return all(
        any(a[dim][1] <= b[dim][0] or b[dim][1] <= a[dim][0] for dim in a.keys() & b.keys())
        for i, a in enumerate(spans)
        for b in spans[:i]
    )


def _detach_parameter(tensor: Tensor) -> Tensor:
    """Make a parameter a constant, once and not in each pass."""
    return tensor.detach() if tensor.requires_grad and tensor.is_leaf else tensor


class _Rebuilder:
    """Builds a recording out of planned calls, in the order of the old one."""

    def __init__(self, old: Recording, calls_by_region: _PartialCalls) -> None:
        self._calls: list[RecordedCall] = []
        self._refs: dict[tuple[TensorRef, Region], TensorRef] = {(TensorRef(-1), WHOLE): TensorRef(-1)}
        whole: dict[int, int] = {}  # calls made as they were: all outputs come from the one new call
        for ref, region in sorted(calls_by_region, key=lambda key: (key[0].call, key[0].output, key[1])):
            call, module = calls_by_region[ref, region], old.calls[ref.call].module
            if region == WHOLE and call.func is old.calls[ref.call].func:
                if ref.call not in whole:
                    whole[ref.call] = self._add(call, module).call
                self._refs[ref, region] = TensorRef(whole[ref.call], ref.output)
            else:
                self._refs[ref, region] = self._add(call, module)
        self.recording = Recording(tuple(self._calls), self._refs[old.output, WHOLE], old.input_shape, old.classes)

    def _add(self, call: PartialCall, module: str) -> TensorRef:
        arguments = map_refs(self._find_slice, (call.args, call.kwargs), TensorSlice)
        args, kwargs = map_tensors(_detach_parameter, arguments)
        return self._call(call.func, args, kwargs, module)

    def _call(self, func: Callable[..., Any], args: Any, kwargs: Any, module: str = "") -> TensorRef:
        self._calls.append(RecordedCall(func, args, kwargs, module=module))
        return TensorRef(len(self._calls) - 1)

    def _find_slice(self, part: TensorSlice) -> TensorRef:
        key = (part.ref, part.region)
        if key not in self._refs:  # only the whole is there
            ref = self._refs[part.ref, WHOLE]
            for dim, start, length in part.region:
                ref = self._call(torch.narrow, (ref, dim, start, length), {})
            self._refs[key] = ref
        return self._refs[key]
