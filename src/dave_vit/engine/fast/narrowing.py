"""Move selections up a recording: what the logits do not need is not computed, forward or backward.

A class token that is picked after the last block needs one row of its MLP and of its queries; queries, keys and values
sliced out of one product need a third of its weight each, and only that of the values is part of the backward pass. A
selection moves up through every call that acts alike on what is selected and on the rest.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dave_vit.engine.fast.partial_calls import plan_partial_call
from dave_vit.engine.fast.recording import WHOLE, RecordedCall, Recording, TensorRef, find_refs, map_refs
from dave_vit.engine.states import map_tensors


def narrow(recording: Recording) -> Recording:
    """Return the recording with every selection moved up as far as possible."""
    return _Rebuilder(recording, _plan_calls(recording)).recording


def _plan_calls(recording: Recording) -> dict[TensorRef, RecordedCall]:
    """Plan the calls from the output backwards: all slices of a result that are needed are known when it is reached."""
    needed: dict[int, set[TensorRef]] = {recording.output.call: {recording.output}}
    planned: dict[TensorRef, RecordedCall] = {}
    for index in reversed(range(len(recording.calls))):
        slices = needed.pop(index, set())
        whole = {ref._replace(region=WHOLE): recording.calls[index] for ref in slices}
        calls = _plan_in_parts(recording, slices) or whole
        planned |= calls
        for ref in find_refs([(call.args, call.kwargs) for call in calls.values()]):
            needed.setdefault(ref.call, set()).add(ref)
    return planned


def _plan_in_parts(recording: Recording, slices: set[TensorRef]) -> dict[TensorRef, RecordedCall] | None:
    """Plan a call for each slice of a call's results, or return None where it is better made as a whole."""
    if not _are_disjoint(slices):
        return None
    calls = {ref: plan_partial_call(recording, recording.calls[ref.call], ref) for ref in slices}
    planned = {ref: call for ref, call in calls.items() if call is not None}
    return planned if len(planned) == len(calls) else None


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
