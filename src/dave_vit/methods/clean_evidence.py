"""Evidence of the clean image: maps of pixels and of the model's constants by two rule sets, for DAVE's reducer."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dave_vit.engine import RuleSet, Target
from dave_vit.engine.fast import PassKind
from dave_vit.engine.fast.compiled import RecordedGradient, target_tensors
from dave_vit.engine.fast.cuda_graphs import BatchFunction
from dave_vit.engine.gradient import Axes, Constant, find_batch_axes, gradient
from dave_vit.engine.rule_sets import ATTENTION_RELEVANCE
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import Method
from dave_vit.methods.constants import CONSTANT_ROWS, find_single, place_constants, sum_channels
from dave_vit.methods.pass_size import PassForm, PassSize

Resolve = Callable[[Target, Tensor], Target]
"""Function of the target of some images and their logits ``[b, classes]`` to the resolved target."""


def keep_target(target: Target, logits: Tensor) -> Target:
    """Return a target that is resolved already."""
    return target


class _Form(NamedTuple):
    """What is called instead of the model, the kind of pass, and whether an image is alone in it."""

    run: Callable[[Tensor], Any] | None = None
    kind: PassKind | None = None
    is_alone: bool = False


@dataclass(frozen=True)
class CleanEvidence:
    """Computes the maps that a reducer takes beside the samples.

    Attributes:
        method: gives the model and its precision.
        rules: the method's own.
        passes: of the method; classes of images on a GPU are then explained by passes that can be captured, for which
            the target is resolved first.
    """

    method: Method
    rules: RuleSet
    passes: RecordedGradient | None = None

    def compute(
        self, images: Tensor, target: Target, rows: PassSize, resolve: Resolve
    ) -> tuple[Tensor, Target, Tensor]:
        """Compute the maps; resolve the target on the same forward pass.

        Args:
            images: ``[b, C, H, W]``; clips have T before C.
            target: what is explained of them.
            rows: images in one pass, and no more than constants allow.
            resolve: resolves the target on the logits.

        Returns:
            Maps ``[b, K, 2, 2, H, W]``, of clips with T after K: by the method's rules and by AttnLRP's; of the pixels,
            and of the constants; the resolved target; logits ``[b, classes]``. A model that AttnLRP's rules do not
            cover has the first maps twice.
        """
        passes, logits = self.passes, None
        most = CONSTANT_ROWS.get(images.device.type, CONSTANT_ROWS["cpu"])
        if passes is not None and images.is_cuda and images.ndim == 4 and target.score is None:
            logits = torch.cat(rows.run_chunks(lambda start, stop: passes.logits(images[start:stop]), len(images)))
            target, resolve = resolve(target, logits), keep_target
        form = PassForm(self.method.model, "constants", self.rules, self.method.autocast, target.read)

        def compute(start: int, stop: int) -> tuple[Tensor, Tensor]:
            step, parts = rows.limit_rows(most, form, images), []
            is_alone = min(rows.rows, step) == 1  # no memory for two images: constants are those of the only one
            for at in range(start, stop, step):
                end = min(at + step, stop)
                part = images[at:end], target.part(at, end)
                if passes is not None and logits is not None and not is_alone:
                    is_all = end - at == len(images)
                    parts.append((self.run_captured(*part, passes, beside=is_all), logits[at:end]))
                else:
                    parts.append(self._compute_by_both(*part, resolve, _Form(is_alone=is_alone)))
            return _join(parts)

        evidence, logits_of_all = _join(rows.run_chunks(compute, len(images)))
        return evidence, resolve(target, logits_of_all), logits_of_all

    def run_captured(self, images: Tensor, target: Target, passes: RecordedGradient, *, beside: bool = False) -> Tensor:
        """Return the maps ``[b, K, 2, 2, H, W]`` for a resolved target, by a graph where there is one."""

        def prepare(images_of_form: Tensor, kind: PassKind = PassKind.RECORDED) -> BatchFunction:
            run = passes.recorded_model.find_run(images_of_form, whole=True)
            if kind is PassKind.TRACED:  # which cannot ask for what a first pass finds out
                self._compute_by_both(images, target, keep_target, _Form(run))

            def function(images: Tensor, columns: Tensor, *weights: Tensor) -> tuple[Tensor]:
                own = Target(columns, weights=weights[0] if weights else None, classes=target.classes)
                return (self._compute_by_both(images, own, keep_target, _Form(run, kind))[0],)

            return function

        def compute() -> tuple[Tensor]:
            by_both = partial(self._compute_by_both, images, target, keep_target)
            with suppress(UnsupportedOperator):  # only the model itself can tell in which of its modules
                return (by_both(_Form(passes.recorded_model.find_run(images, whole=True)))[0],)
            return (by_both(_Form())[0],)

        return passes.run("evidence", prepare, target_tensors(images, target), compute, beside=beside)[0]

    def _compute_by_both(self, images: Tensor, target: Target, resolve: Resolve, form: _Form) -> tuple[Tensor, Tensor]:
        """Return the maps ``[b, K, 2, 2, H, W]`` by the method's rules and by AttnLRP's, and logits."""
        compute, resolved = partial(self._compute_by_rules, images, form), target

        def resolve_once(target: Target, logits: Tensor) -> Target:
            nonlocal resolved
            resolved = resolve(target, logits)  # which may wait for the device
            return resolved

        own, logits = compute(target, self.rules, resolve_once)
        other = None
        with suppress(UnsupportedOperator):
            other = compute(resolved, ATTENTION_RELEVANCE, keep_target)[0]
        return torch.stack([own, own if other is None else other], -4), logits

    def _compute_by_rules(
        self, images: Tensor, form: _Form, target: Target, rules: RuleSet, resolve: Resolve
    ) -> tuple[Tensor, Tensor]:
        """Return maps of pixels and of constants by one rule set, ``[b, K, 2, H, W]``, and logits ``[b, classes]``."""
        model, autocast = self.method.model, self.method.autocast
        run = form.run or getattr(model, "_orig_mod", model)  # the images were checked already
        compute = partial(gradient, model, images, target, rules=rules, autocast=autocast, run=run, kind=form.kind)
        compute = partial(compute, resolve=partial(resolve, target))
        if images.ndim > 4:  # where a constant acts in a clip is not known
            passed = compute()
            pixels = (passed.weight * images.unsqueeze(1)).sum(-3)
            return torch.stack([pixels, torch.zeros_like(pixels)], -3), passed.logits
        axes: Axes = [] if form.is_alone else find_batch_axes(model, images, target, rules=rules, autocast=autocast)

        def combine(weight: Tensor, constants: Sequence[Constant]) -> Tensor:
            sides = [find_single(constant.value) for constant in constants] if form.is_alone else axes or []
            pairs = [(constant, side) for constant, side in zip(constants, sides, strict=False) if side is not None]
            pixels = (weight * images).sum(1)
            return torch.stack([pixels, place_constants(pairs, pixels)], 1)

        passed = compute(combine=combine, shorten=sum_channels)
        return passed.weight, passed.logits


def _join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate evidence and logits of several passes; those of one, which may still be computed, are not read."""
    evidence, logits = (column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts, strict=True))
    return evidence, logits
