"""Models without what their logits do not need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fast import is_enabled
from dave_vit.engine.fast.narrowing import narrow
from dave_vit.engine.fast.recording import Recording, RecordingError, record_calls
from dave_vit.engine.fingerprint import fingerprint_model, forget_fingerprints
from dave_vit.engine.gradient import Gradient, gradient
from dave_vit.engine.targets import Target, TargetLike
from dave_vit.errors import UnsupportedOperator


@dataclass
class _ModelRecordings:
    """The recordings of one model, in one state of it."""

    state: int | None = None
    recordings: dict[tuple[Any, ...], Recording | None] = field(default_factory=dict)
    changes_itself: bool = False  # its settings change with every pass, so that no recording serves the next


_RECORDINGS: WeakKeyDictionary[nn.Module, _ModelRecordings] = WeakKeyDictionary()


class RecordedModel:
    """Forward passes that leave out what the logits do not need, recorded once for each model and form of inputs.

    A model that cannot be recorded is run as it is. A recording holds the model's parameters, not copies of them; it is
    made again when a parameter, a module or a setting was replaced.

    Args:
        model: any module that maps inputs to logits.
        autocast: the type under which the passes will run.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.autocast = autocast

    def find_run(self, inputs: Tensor) -> Callable[[Tensor], Any]:
        """Return what to call for inputs of this form: a recording, or the model where there is none."""
        recording = self._find_recording(inputs)
        return self.model if recording is None else recording.run

    def gradient(self, inputs: Tensor, target: TargetLike, rules: RuleSet, *, once: bool = False) -> Gradient:
        """Compute scores and derivatives under a rule set, as ``engine.gradient`` does for the model.

        The inputs are not checked: views of checked images are finite too, and a check would wait for the device.

        Args:
            inputs: ``[B, C, H, W]``.
            target: what is explained.
            rules: the derivatives in force.
            once: inputs of this form may not come again: a recording would take longer than it saves.
        """
        target = Target.of(target, len(inputs))
        compute = partial(gradient, self.model, inputs, target, rules=rules, autocast=self.autocast)
        if once or target.score is not None:  # a score reads the model's own output, and a recording has logits only
            return compute(run=self.model)
        try:
            return compute(run=self.find_run(inputs))
        except UnsupportedOperator:  # only the model itself can tell in which of its modules
            return compute(run=self.model)

    def count_classes(self, inputs: Tensor) -> int | None:
        """Return how many logits the model has, if that can be known without running it."""
        recording = self._find_recording(inputs[:1])
        return None if recording is None else recording.classes

    def _find_recording(self, inputs: Tensor) -> Recording | None:
        fingerprint = fingerprint_model(self.model)
        if fingerprint.hooked or not is_enabled():
            return None  # a recording would not call hooks
        known = _RECORDINGS.setdefault(self.model, _ModelRecordings())
        if fingerprint.settings != known.state:
            known.recordings, known.state = {}, fingerprint.settings
        key = (inputs.shape, inputs.dtype, inputs.device, self.autocast)
        if key not in known.recordings and not known.changes_itself:
            known.recordings[key] = self._record(inputs)
            known.changes_itself = fingerprint_model(self.model).settings != fingerprint.settings
        return None if known.changes_itself else known.recordings[key]

    def _record(self, inputs: Tensor) -> Recording | None:
        forget_fingerprints()
        with torch.autocast(inputs.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            try:
                return narrow(record_calls(self.model, inputs))
            except RecordingError:
                return None
