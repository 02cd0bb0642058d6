"""Models without what their logits do not need."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit.engine.autograd_graph import check_graph
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fast import is_enabled
from dave_vit.engine.fast.narrowing import narrow
from dave_vit.engine.fast.recording import Recorder, Recording
from dave_vit.engine.fingerprint import Fingerprint, fingerprint_model
from dave_vit.engine.forward import count_passes, forward, isolate_pass
from dave_vit.engine.gradient import Gradient, gradient
from dave_vit.engine.interception import Interception
from dave_vit.engine.states import tensors
from dave_vit.engine.targets import Target, TargetLike
from dave_vit.errors import UnsupportedOperator

_MAX_PASSES = 4  # after which a model that never repeats itself is run as it is
_NO_RULES = RuleSet("recording", strict=False)


@dataclass
class _ModelRecordings:
    """The recordings of one model, in one state of it, and the forms that cannot be recorded, in one structure."""

    state: int | None = None
    structure: int | None = None
    recordings: dict[tuple[Any, ...], tuple[Recording, Recording]] = field(default_factory=dict)  # narrowed, and whole
    unrecordable: set[tuple[Any, ...]] = field(default_factory=set)
    changes_itself: bool = False  # its state changes with every pass, so that no recording serves the next

    def update(self, fingerprint: Fingerprint) -> None:
        """Drop what is not valid for the model as it is now."""
        if fingerprint.state != self.state:
            self.recordings, self.state = {}, fingerprint.state
        if fingerprint.structure != self.structure:
            self.unrecordable, self.structure = set(), fingerprint.structure


_RECORDINGS: WeakKeyDictionary[nn.Module, _ModelRecordings] = WeakKeyDictionary()


class RecordedModel:
    """Forward passes that leave out what the logits do not need, recorded once for each model and form of inputs.

    A model that cannot be recorded is run as it is. A recording holds the model's parameters, not copies of them; it is
    made again when anything changes that the model may read (see ``fingerprint``).

    Args:
        model: any module that maps inputs to logits.
        autocast: the type under which the passes will run.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.autocast = autocast

    def find_run(self, inputs: Tensor, *, whole: bool = False) -> Callable[[Tensor], Any]:
        """Return what to call for inputs of this form: a recording, or the model where there is none.

        Args:
            inputs: ``[B, C, H, W]``.
            whole: compute all tokens in all layers, although the logits may not need them.
        """
        recordings = self._find_recordings(inputs)
        return self.model if recordings is None else recordings[whole]

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
        """Return how many logits the model has, if a recording tells."""
        recordings = self._find_recordings(inputs)
        return None if recordings is None else recordings[0].classes

    def _find_recordings(self, inputs: Tensor) -> tuple[Recording, Recording] | None:
        fingerprint = fingerprint_model(self.model)
        if not (is_enabled() and fingerprint.is_recordable):
            return None
        known = _RECORDINGS.setdefault(self.model, _ModelRecordings())
        known.update(fingerprint)
        key = (inputs.shape, inputs.dtype, inputs.device, self.autocast, torch.get_default_dtype())
        if key not in known.recordings and key not in known.unrecordable and not known.changes_itself:
            recording = self._record(inputs)
            known.update(fingerprint_model(self.model))  # a pass may fill caches
            if recording is None:
                known.unrecordable.add(key)
            else:
                known.recordings[key] = (narrow(recording), recording)
        return known.recordings.get(key)

    def _record(self, inputs: Tensor) -> Recording | None:
        """Record passes of the model until one is complete: what a model only does in its first pass is not in it."""
        latest: Recording | None = None
        for _ in range(_MAX_PASSES):
            state = fingerprint_model(self.model).state
            recording = self._record_pass(inputs)
            fingerprint = fingerprint_model(self.model)
            if recording is None or not fingerprint.is_recordable:
                return None
            constants = tensors([(call.args, call.kwargs) for call in recording.calls])
            is_known = fingerprint.tensors.issuperset(map(id, constants))
            if fingerprint.state == state and (is_known or (latest is not None and recording.repeats(latest))):
                return recording
            latest = recording if fingerprint.state == state else None
        _RECORDINGS[self.model].changes_itself = True
        return None

    def _record_pass(self, inputs: Tensor) -> Recording | None:
        """Record one pass, with ordinary derivatives; None where the model cannot be recorded."""
        recorder = Recorder(self.model)
        with isolate_pass(inputs), count_passes():  # it is no pass of a map
            try:
                _, logits = forward(recorder, inputs, Interception(_NO_RULES, self.model), self.autocast)
                check_graph(logits)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:  # which the pass of the map itself will tell, with the module's name
                return None
        return recorder.recording
