"""A model without what its logits do not need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fast.narrowing import narrowed
from dave_vit.engine.fast.recording import Tape, Unrecordable, record
from dave_vit.engine.fingerprint import fingerprint_model, forget_fingerprints
from dave_vit.engine.gradient import Gradient, gradient
from dave_vit.engine.targets import Target, TargetLike
from dave_vit.errors import UnsupportedOperator


@dataclass
class _Recordings:
    """Of one model, in one state of it."""

    state: int | None = None
    tapes: dict[tuple[Any, ...], Tape | None] = field(default_factory=dict)
    counting: bool = False  # its settings change with every pass, so that none can stand for the next


_RECORDINGS: WeakKeyDictionary[nn.Module, _Recordings] = WeakKeyDictionary()


class RecordedModel:
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

    def gradient(self, inputs: Tensor, target: TargetLike, rules: RuleSet, *, once: bool = False) -> Gradient:
        """Score and derivative under a rule set, as ``run.gradient`` gives them for the model.

        The inputs are not looked at: views of images that were are finite too, and a look would wait for the device.

        Args:
            inputs: ``[B, C, H, W]``.
            target: what is explained.
            rules: the derivatives in force.
            once: inputs of this form may not come again: a recording would take longer than it saves.
        """
        wanted = Target.of(target, len(inputs))
        passed = partial(gradient, self.model, inputs, wanted, rules=rules, autocast=self.autocast)
        if once or wanted.score is not None:  # a score looks at what the model returns, and a recording holds logits
            return passed(run=self.model)
        try:
            return passed(run=self.of(inputs))
        except UnsupportedOperator:  # only the model itself can tell in which of its modules
            return passed(run=self.model)

    def classes(self, inputs: Tensor) -> int | None:
        """How many logits the model has, if that can be known without running it."""
        tape = self._tape(inputs[:1])
        return None if tape is None else tape.classes

    def _tape(self, inputs: Tensor) -> Tape | None:
        seen = fingerprint_model(self.model)
        if seen.hooked:
            return None  # a recording would not call them
        known = _RECORDINGS.setdefault(self.model, _Recordings())
        if seen.settings != known.state:
            known.tapes, known.state = {}, seen.settings
        key = (inputs.shape, inputs.dtype, inputs.device, self.autocast)
        if key not in known.tapes and not known.counting:
            known.tapes[key] = self._recorded(inputs)
            known.counting = fingerprint_model(self.model).settings != seen.settings
        return None if known.counting else known.tapes[key]

    def _recorded(self, inputs: Tensor) -> Tape | None:
        forget_fingerprints()
        with torch.autocast(inputs.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            try:
                return narrowed(record(self.model, inputs))
            except Unrecordable:
                return None
