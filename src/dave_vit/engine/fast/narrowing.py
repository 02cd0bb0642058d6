"""Selections move up a tape: what nobody looks at is not computed, forward or backward.

A class token that is picked after the last block needs one row of its MLP and of its queries; queries, keys and values
cut out of one product need a third of its weight each, and only the values' third is gone through on the way back. A
selection moves up through every call that acts alike on what is selected and on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.fast.partial_calls import WHOLE, Box, Plan, Want, part
from dave_vit.engine.fast.recording import Recorded, Ref, Tape, map_refs

_Plans = dict[tuple[Ref, Box], Plan]


def narrowed(tape: Tape) -> Tape:
    """The same tape with every selection moved up as far as it goes."""
    return _Rebuilt(tape, _plans(tape)).tape


def _plans(tape: Tape) -> _Plans:
    """What to compute, found from the output backwards: all that is wanted of a call is known when it is reached."""
    wanted: dict[Ref, set[Box]] = {tape.output: {WHOLE}}
    plans: _Plans = {}
    for index in reversed(range(len(tape.calls))):
        places = (Ref(index, output) for output in range(len(tape.calls[index].shapes)))
        boxes = {ref: wanted[ref] for ref in places if ref in wanted}
        found = _in_parts(tape, boxes) or _as_a_whole(tape, boxes)
        plans |= found
        for want in _wants(list(found.values())):
            wanted.setdefault(want.ref, set()).add(want.box)
    return plans


def _as_a_whole(tape: Tape, boxes: dict[Ref, set[Box]]) -> _Plans:
    plans = {}
    for ref in boxes:
        call = tape.calls[ref.call]
        args, kwargs = map_refs(Want, (call.args, call.kwargs))
        plans[ref, WHOLE] = Plan(call.func, args, kwargs, ref.output)
    return plans


def _in_parts(tape: Tape, boxes: dict[Ref, set[Box]]) -> _Plans | None:
    """A plan for each box that is wanted of a call, or None where it is better made as a whole."""
    plans = {}
    for ref, wanted in boxes.items():
        if not _disjoint(wanted):
            return None
        for box in wanted:
            plan = part(tape, tape.calls[ref.call], ref.output, box)
            if plan is None:
                return None
            plans[ref, box] = plan
    return plans


def _disjoint(boxes: set[Box]) -> bool:
    """Whether no element is wanted twice: it would be computed twice."""
    spans = [{dim: (start, start + length) for dim, start, length in box} for box in boxes]
    return all(
        any(a[dim][1] <= b[dim][0] or b[dim][1] <= a[dim][0] for dim in a.keys() & b.keys())
        for i, a in enumerate(spans)
        for b in spans[:i]
    )


def _wants(value: Any) -> Iterator[Want]:
    if isinstance(value, Want):
        yield value
    elif isinstance(value, Plan):
        yield from _wants([value.args, value.kwargs])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _wants(item)
    elif isinstance(value, dict):
        yield from _wants(list(value.values()))


class _Rebuilt:
    """The tape made of plans, in the order of the old one."""

    def __init__(self, old: Tape, plans: _Plans) -> None:
        self._calls: list[Recorded] = []
        self._made: dict[tuple[Ref, Box], Ref] = {(Ref(-1), WHOLE): Ref(-1)}
        whole: dict[int, int] = {}  # calls made as they were: all outputs come from the one new call
        for ref, box in sorted(plans, key=lambda made: (made[0].call, made[0].output, made[1])):
            plan, module = plans[ref, box], old.calls[ref.call].module
            if box == WHOLE and plan.func is old.calls[ref.call].func:
                if ref.call not in whole:
                    whole[ref.call] = self._add(plan, module).call
                self._made[ref, box] = Ref(whole[ref.call], ref.output)
            else:
                self._made[ref, box] = self._add(plan, module)
        self.tape = Tape(tuple(self._calls), self._made[old.output, WHOLE], old.input_shape, old.classes)

    def _add(self, plan: Plan, module: str) -> Ref:
        return self._call(plan.func, self._given(plan.args), self._given(plan.kwargs), module)

    def _call(self, func: Callable[..., Any], args: Any, kwargs: Any, module: str = "") -> Ref:
        self._calls.append(Recorded(func, args, kwargs, module=module))
        return Ref(len(self._calls) - 1)

    def _given(self, value: Any) -> Any:
        if isinstance(value, Want):
            return self._part(value)
        if isinstance(value, list | tuple):
            return type(value)([self._given(item) for item in value])
        if isinstance(value, dict):
            return {key: self._given(item) for key, item in value.items()}
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            return value.detach()  # a parameter, which is a constant here: once, and not in each pass
        return value

    def _part(self, want: Want) -> Ref:
        key = (want.ref, want.box)
        if key not in self._made:  # only the whole is there
            ref = self._made[want.ref, WHOLE]
            for dim, start, length in want.box:
                ref = self._call(torch.narrow, (ref, dim, start, length), {})
            self._made[key] = ref
        return self._made[key]
