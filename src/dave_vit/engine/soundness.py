"""Check whether a model can be explained exactly, before its first map; results are cached.

Once for each model, size of input and rule set, one image is run under the interception with a tracker beneath, another
one after it, and the first once more as it is; for each size of batch, some of its images are also run alone. What
depends on the image out of the interception's sight, constants that change, logits that the interception changes, and
images that are mixed with the others of their batch are refused.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.dataflow import CallConstants, MemoryTracker, TrackedInterception, another_image
from dave_vit.engine.fast import substitute_rules
from dave_vit.engine.fingerprint import fingerprint_model, forget_fingerprints
from dave_vit.engine.forward import HoldDraws, autocast_context, isolate_pass
from dave_vit.engine.states import tensors
from dave_vit.engine.targets import Score, Target
from dave_vit.errors import OutputError, UnsupportedOperator

_CHECKED: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()
_FEW = 3  # a batch of so many is checked whole; in a larger one the second is not in the middle, where flips end
_OTHER_ORDERS = 8  # that must leave the output alone where a model shuffles its tokens
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative to the largest logit
_COARSE = 0.1  # in half precision


def check_soundness(
    model: nn.Module,
    inputs: Tensor,
    rules: RuleSet,
    autocast: torch.dtype | None = None,
    *,
    logits: Tensor | None = None,
    score: Score | None = None,
    is_random: bool = False,
) -> None:
    """Raise UnsupportedOperator if a strict rule set would explain the model wrongly; cached per model and input form.

    Args:
        model: as it will be run.
        inputs: the batch that is explained.
        rules: only strict rule sets are checked.
        autocast: run the model under autocast with this type.
        logits: of the batch, or values of the score, if they are known already.
        score: what is explained, if it is no class: the rest of the output is then not checked.
        is_random: the model is known to draw random numbers, which plain passes must not take from the global state.
    """
    if not rules.strict:
        return
    check, fingerprint = _SoundnessCheck(model, rules, autocast, score, is_random), fingerprint_model(model)
    if not isinstance(score, Hashable):
        check.check(inputs, logits, is_tracked=False)
        return
    known = _CHECKED.setdefault(model, {})
    key = (_score_key(score), rules.pass_identity, inputs.shape[1:], inputs.dtype, inputs.device, autocast)
    size = min(len(inputs), _FEW + 1)
    if fingerprint.is_known_as(known.get((*key, size))):
        return
    if size > 1 and bool((inputs[1:] == inputs[:1]).all()):
        size = 0  # copies of one image do not show whether they are mixed: a batch of other images is checked again
    if not fingerprint.is_known_as(known.get((*key, size))):
        # A single image is tracked in a batch of any size: checks of further sizes only look at what the batch does.
        is_single = check.check(inputs, logits, is_tracked=fingerprint.is_known_as(known.get((*key, 1))))
        for dead in [key for key in known if isinstance(key[0], ref) and key[0]() is None]:
            del known[dead]
        number = fingerprint_model(model).known_as(fingerprint)
        known.update(dict.fromkeys([(*key, size), *([(*key, 1)] if is_single else [])], number))


def _score_key(score: Score | None) -> Any:
    """Return what a score computes, or a key that does not keep it alive: it may hold the model itself."""
    if (computation := getattr(score, "computation", None)) is not None:
        return computation
    try:
        return None if score is None else (WeakMethod if isinstance(score, MethodType) else ref)(score)
    except TypeError:  # such as operator.itemgetter, to which nothing can refer weakly
        return score


@dataclass(frozen=True)
class _SoundnessCheck:
    """A check of a model as it will be run; with a score, only the score is checked."""

    model: nn.Module
    rules: RuleSet
    autocast: torch.dtype | None
    score: Score | None
    is_random: bool

    def check(self, inputs: Tensor, logits: Tensor | None, *, is_tracked: bool) -> bool:
        """Raise if some image would be explained wrongly; return whether single images are known to be explained well.

        Args:
            inputs: the batch.
            logits: of the batch, if they are known already.
            is_tracked: single images are known to be explained well: only what the batch does to them is checked.
        """
        mixes = len(inputs) > 1 and self.score is None  # a score may hold numbers of its own for each image
        if is_tracked and not mixes:
            return True
        forget_fingerprints()
        if logits is None and not is_tracked:  # what a first pass keeps is then marked as made of the image
            self._run_tracked(inputs)
        places = range(len(inputs)) if len(inputs) <= _FEW else [1]  # the first one's place may be a special one
        runs = ((place, self._run_alone(inputs[place : place + 1], batch=len(inputs))) for place in places)
        alone = {place: output for place, output in runs if output is not None}  # empty where the batch size is fixed
        is_tracked = is_tracked or self._check_image(inputs, logits, alone)
        if mixes and alone:
            self._check_mixing(inputs, logits, alone)
        return is_tracked

    def _check_image(self, inputs: Tensor, logits: Tensor | None, alone: Mapping[int, list[Tensor]]) -> bool:
        """Track the last of the images that was run alone, or the batch; return whether it was a single image."""
        place = max(alone, default=0)
        shown, plain = (inputs[place : place + 1].clone(), alone[place]) if alone else (inputs, None)
        try:
            watched, passed, tracker = self._run_tracked(shown)
        except UnsupportedOperator:
            if len(shown) == len(inputs):
                raise
            shown, plain = inputs, None  # other code for one image than for several, which may be covered
            watched, passed, tracker = self._run_tracked(shown)
        if any(bool(torch.isnan(output).any()) for output in (watched if logits is None else [logits])):
            raise OutputError("the model's output holds NaN; check the weights, the masks and the range of the input")
        plain, limit = plain or self._run_plain(shown), self._limit(inputs)
        seeds = range(1, 1 + _OTHER_ORDERS) if tracker.random_use else ()
        if any(_differ(plain, self._run_plain(shown, seed=seed), limit) for seed in seeds):
            raise UnsupportedOperator(tracker.random_use)
        if _differ(watched, plain, limit):
            raise UnsupportedOperator(
                "the logits change under the interception, so that the map would be another model's; remove what asks "
                "for modes, or for gradients inside of the model (torch.func, torch.autograd.grad)"
            )
        changed = self._run_tracked(another_image(shown, passed.calls), passed.calls)[1].changed
        if changed:
            raise UnsupportedOperator(
                f"what {changed} takes for a constant changes with the image or from call to call; compute it by torch "
                "functions in the calling thread, and keep nothing of an earlier call"
            )
        return len(shown) == 1

    def _check_mixing(self, inputs: Tensor, logits: Tensor | None, alone: Mapping[int, list[Tensor]]) -> None:
        """Compare the outputs of single images with those of the same images in their batch."""
        known = logits is not None and any(one.shape[1:] == logits.shape[1:] for one in next(iter(alone.values())))
        beside = [logits] if known and logits is not None else self._run_plain(inputs[:_FEW])
        for place, single in alone.items():
            own = [output for output in single if logits is None or output.shape[1:] == logits.shape[1:]][:1]
            pair = [output[place : place + 1] for output in beside], own if known else single
            if _differ(*pair, self._limit(inputs)):
                raise UnsupportedOperator(
                    "the logits of an image change with the other images of its batch, so that a map would mix them; "
                    "explain images one by one, or normalise within each image"
                )

    def _limit(self, inputs: Tensor) -> float:
        """Return how much outputs may differ, relative to the largest."""
        return _COARSE if self.autocast is not None else _ROUNDING.get(inputs.dtype, _COARSE)

    def _run_tracked(
        self, images: Tensor, expected: Sequence[CallConstants] = ()
    ) -> tuple[list[Tensor], TrackedInterception, MemoryTracker]:
        """Return the output under the interception, if nothing escapes it, and what was recorded and tracked."""
        mode = TrackedInterception(substitute_rules(self.rules), self.model, expected=expected)
        with isolate_pass(images), autocast_context(images, self.autocast):
            entered = images.detach().requires_grad_().clone()
            tracker = mode.tracker = MemoryTracker(entered, mode.location)
            with mode, tracker:
                output = self._select_outputs(self.model(mode.enter(entered)), len(images))
            if tracker.problem:
                raise UnsupportedOperator(tracker.problem)
            return [tensor.detach() for tensor in output], mode, tracker

    def _run_alone(self, image: Tensor, *, batch: int) -> list[Tensor] | None:
        """Return the output for one image of a batch, or None if the model does not accept a single image."""
        try:
            return self._run_plain(image)
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            if batch == 1 or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            return None

    def _run_plain(self, images: Tensor, *, seed: int = 0) -> list[Tensor]:
        held = HoldDraws(seed) if self.is_random else nullcontext()  # a mode that other models would see
        with isolate_pass(images), held, torch.no_grad(), autocast_context(images, self.autocast):
            return self._select_outputs(self.model(images.clone()), len(images))

    def _select_outputs(self, output: Any, batch: int) -> list[Tensor]:
        """Return all per-image tensors of an output, or the values of the score."""
        if self.score is not None:
            return [Target(score=self.score).read(output, batch)]
        collected = tensors(output) or tensors(dict(vars(output)) if hasattr(output, "__dict__") else ())
        return [tensor.detach() for tensor in collected if tensor.is_floating_point() and tensor.shape[:1] == (batch,)]


def _differ(left: list[Tensor], right: list[Tensor], limit: float) -> bool:
    return len(left) != len(right) or not all(map(partial(_close, limit=limit), left, right))


def _close(left: Tensor, right: Tensor, limit: float) -> bool:
    left, right = left.cpu().double(), right.cpu().double()
    finite = right[right.isfinite()]  # a class may be ruled out by -inf
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return left.shape == right.shape and torch.allclose(left, right, rtol=0.0, atol=limit * scale, equal_nan=True)
