"""A model without what its logits do not need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit.errors import UnsupportedOperator
from dave_vit.intercept.calls import RuleSet
from dave_vit.run.gradient import Gradient, gradient
from dave_vit.run.selections import narrowed
from dave_vit.run.sound import structure
from dave_vit.run.tape import Tape, Unrecordable, record
from dave_vit.targets import Target, TargetLike


@dataclass
class _Recordings:
    """Of one model, in one state of it."""

    state: tuple[int, ...] = ()
    tapes: dict[tuple[Any, ...], Tape | None] = field(default_factory=dict)
    counting: bool = False  # its settings change with every pass, so that none can stand for the next


_RECORDINGS: WeakKeyDictionary[nn.Module, _Recordings] = WeakKeyDictionary()


class LeanModel:
    """Forward passes that leave out what nobody looks at, recorded once for each model and form of inputs.

    Where a model cannot be recorded, it stays as it is. A recording holds the model's parameters, not copies of them;
    one that was made before a parameter, a module or a setting was replaced is made again.

    Args:
        model: any module that maps inputs to logits.
        autocast: the type under which the passes will run.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.autocast = autocast

    def of(self, inputs: Tensor) -> Callable[[Tensor], Any]:
        """What to call in the model's place for inputs of this form."""
        tape = self._tape(inputs)
        return self.model if tape is None else tape.play

    def gradient(self, inputs: Tensor, target: TargetLike, rules: RuleSet) -> Gradient:
        """Score and derivative under a rule set, as ``run.gradient`` gives them for the model."""
        wanted = Target.of(target, len(inputs))
        if wanted.score is not None:  # it looks at the output as the model returns it, and a recording holds logits
            return gradient(self.model, inputs, wanted, rules=rules, autocast=self.autocast)
        try:
            return gradient(self.model, inputs, wanted, rules=rules, autocast=self.autocast, run=self.of(inputs))
        except UnsupportedOperator:  # only the model itself can tell in which of its modules
            return gradient(self.model, inputs, wanted, rules=rules, autocast=self.autocast)

    def classes(self, inputs: Tensor) -> int | None:
        """How many logits the model has, if that can be known without running it."""
        tape = self._tape(inputs[:1])
        return None if tape is None else tape.classes

    def _tape(self, inputs: Tensor) -> Tape | None:
        if any(module._forward_hooks or module._forward_pre_hooks for module in self.model.modules()):
            return None  # a recording would not call them
        known = _RECORDINGS.setdefault(self.model, _Recordings())
        state = _state(self.model)
        if state != known.state:
            known.tapes, known.state = {}, state
        key = (inputs.shape, inputs.dtype, inputs.device, self.autocast)
        if key not in known.tapes and not known.counting:
            known.tapes[key] = self._recorded(inputs)
            known.counting = _state(self.model) != state
        return None if known.counting else known.tapes[key]

    def _recorded(self, inputs: Tensor) -> Tape | None:
        with torch.autocast(inputs.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            try:
                return narrowed(record(self.model, inputs))
            except Unrecordable:
                return None


def _state(model: nn.Module) -> tuple[int, ...]:
    """Changes with whatever a recording could have taken from the model."""
    places = (parameter.data_ptr() for parameter in model.parameters())
    numbers = (value for module in model.modules() for value in vars(module).values() if type(value) is int)
    return structure(model), *places, *numbers
