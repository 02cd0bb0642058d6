"""DAVE: the effective transformation averaged over a neighbourhood of the image, times the image (eq. (8), (9))."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fast.compiled import CompiledGradient
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.fingerprint import cache_fingerprints
from dave_vit.engine.rule_sets.effective import EFFECTIVE
from dave_vit.engine.targets import Target, TargetLike
from dave_vit.errors import OptionError, TargetError
from dave_vit.methods.base import (
    METHODS,
    Explanation,
    Method,
    MethodInfo,
    check_at_least_one,
    join_explanations,
    multiply_by_input,
)
from dave_vit.methods.certainty import ENOUGH
from dave_vit.methods.clean_prediction import CleanPrediction
from dave_vit.methods.pass_size import PassSize, clean_logits, even_chunk_size
from dave_vit.methods.presets import NOISE_SWITCHES, Against, load_preset
from dave_vit.methods.sampling import SampleEstimate, SampleGroup, merge_groups
from dave_vit.neighborhood import Neighborhood, Views
from dave_vit.reduce import REDUCERS, Mean, Reducer

_KEPT_BYTES = 256 * 2**20  # draws are kept between batches up to this size
_READ_BYTES = 24  # a pixel, beside its noise: where it is read on the way to a view and, in two steps, on the way back
_FIRST = 8  # views that say whether the neighbourhood fits, and the fewest of samples="auto"
_STEP = 4  # views between two looks of samples="auto"
_SURVIVES = 0.5  # of the predicted class's probability, on the first views, for a neighbourhood to fit


@METHODS.register("dave")
class DAVE(Method):
    """Distribution-aware attribution via ViT gradient decomposition.

    Args:
        model: any module that maps inputs to logits.
        samples: views of each image, T; "auto" for as many as the map needs to settle, from 8 to ``limit``; the
            preset's own number by default.
        seed: the same seed gives the same map, whatever the batch and the chunk.
        preset: "default", "exact", "threshold", "paper", "official", or a file that ``tune`` wrote; the following
            arguments change single points of it.
        neighborhood: where views are drawn.
        reducer: how samples become one map: a reducer, or the name of one.
        rules: the rule set of the effective transformation.
        weighted: whether a view counts by the probability of the explained class on it.
        against: "rivals" sets classes against their rivals where a model's classes compete; a ``Contrast`` says so too.
        limit: the most views of ``samples="auto"``; the preset's own number by default.
        chunk: views in one forward pass; halved by itself where memory does not suffice.
        autocast: run the model under autocast, for example ``torch.bfloat16``.
        compiled: compile forward and backward pass into one graph (worth it for many images of one size).
        switches: single switches of the neighbourhood, such as ``rotation=0`` or ``noise_level=0.2``.

    Example:
        >>> dave = DAVE(model)
        >>> attribution = dave.attribute(images)
        >>> for explanation in dave.refine(images):
        ...     show(explanation.map, explanation.standard_error)
    """

    info = MethodInfo(
        "Relevance averaged over flips, rotations, shifts and noise, where it is significant at every scale.",
        "Wróbel et al., ICML 2026; preset default",
        "1 + T forward, T backward",
        unit="logit",
    )

    def __init__(
        self,
        model: nn.Module,
        samples: int | Literal["auto"] | None = None,
        seed: int = 0,
        preset: str = "default",
        *,
        neighborhood: Neighborhood | None = None,
        reducer: Reducer | str | None = None,
        rules: RuleSet | None = None,
        weighted: bool | None = None,
        against: Against | None = None,
        limit: int | None = None,
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
        compiled: bool = False,
        **switches: Any,
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        chosen = load_preset(preset, model)
        if neighborhood is not None:
            chosen = replace(chosen, neighborhood=neighborhood, narrower=())
        chosen = chosen.switched(switches)
        self.neighborhood, self.narrower = chosen.neighborhood, chosen.narrower
        self.reducer: Reducer = REDUCERS[reducer]() if isinstance(reducer, str) else reducer or chosen.reducer
        self.rules = rules or chosen.rules
        self.postprocess = chosen.postprocess
        self.weighted = chosen.weighted if weighted is None else weighted
        self.against: Against = chosen.against if against is None else against
        self.samples: int | str = chosen.samples if samples is None else samples
        self.limit = _limit(self.samples, limit or chosen.samples)
        self.seed = seed
        self._kept: dict[tuple[Any, ...], Views] = {}
        self._compiled = CompiledGradient(model, self.rules, autocast) if compiled else None
        self._recorded_model = RecordedModel(model, autocast) if self._compiled is None else self._compiled.lean

    @property
    def levels(self) -> tuple[Neighborhood, ...]:
        """The neighbourhoods from the widest to the narrowest."""
        return (self.neighborhood, *self.narrower)

    @classmethod
    def options_for_budget(cls, budget: int, **options: Any) -> dict[str, Any]:
        """One pass for each view, and one for the image itself where the preset looks at it.

        Views of a neighbourhood that turned out too wide for an image come on top.
        """
        chosen = load_preset(
            options.get("preset") or inspect.signature(cls).parameters["preset"].default, nn.Identity()
        )
        weighted, against = (options.get(name, getattr(chosen, name)) for name in ("weighted", "against"))
        looks = bool(weighted or chosen.narrower or against == "rivals")
        return {"samples": max(1, budget - looks)}

    @torch.inference_mode(mode=False)
    def refine(self, inputs: Tensor, target: TargetLike = None) -> Iterator[Explanation]:
        """The explanation after each chunk of samples; the last one equals ``explain``."""
        images, wanted, pass_size = self._prepare(inputs, target)
        size = pass_size.rows
        runs = [
            self._refined(images[start : start + size], wanted.part(start, start + size), pass_size)
            for start in range(0, len(images), size)
        ]
        latest: list[Explanation | None] = [None] * len(runs)
        for found in zip_longest(*runs):
            latest = [new or old for new, old in zip(found, latest, strict=True)]
            made = join_explanations([each for each in latest if each is not None])
            yield self._finish(made, images, wanted)

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        with cache_fingerprints():
            *_, last = self._drawn(images, target, pass_size)
        return merge_groups(last)

    def _refined(self, images: Tensor, target: Target, pass_size: PassSize) -> Iterator[Explanation]:
        """The explanation of some images, again after each chunk of samples."""
        return map(merge_groups, self._drawn(images, target, pass_size))

    def _drawn(self, images: Tensor, target: Target, pass_size: PassSize) -> Iterator[list[SampleGroup]]:
        """Some images, grouped by how they are drawn around, after each chunk of samples."""
        groups, rows = (
            [self._started(images, target, pass_size)],
            pass_size.rows,
        )  # halving does not change what is drawn
        while not all(group.done for group in groups):
            groups = [part for group in groups for part in self._advanced(group, pass_size, rows)]
            yield groups

    def _started(self, images: Tensor, target: Target, pass_size: PassSize) -> SampleGroup:
        """All images, before the first sample."""
        target, clean = self._looked(images, target, pass_size)
        where = torch.arange(len(images), device=images.device)
        estimate = SampleEstimate(self.reducer.accumulator(), target, self.postprocess, tuple(images.shape[1:-3]))
        return SampleGroup(where, images, clean, estimate, 0, torch.zeros(len(images), device=images.device))

    def _looked(self, images: Tensor, target: Target, pass_size: PassSize) -> tuple[Target, CleanPrediction | None]:
        """The target with all that the clean images say, and what they say of their views, where that is asked for."""
        asked = self.weighted or self.narrower or self.against == "rivals"
        if not asked or target.score is not None:  # a score has no classes: nothing tells how much of it survives
            return self._resolve_target(images, target, pass_size), None
        logits = self._said(images, pass_size)
        clean = CleanPrediction.of(self.model, logits)
        alone = self.against == "none" or target.against is not None
        return (target.resolve(logits) if alone else clean.contrast(target, logits)), clean

    def _advanced(self, group: SampleGroup, pass_size: PassSize, rows: int) -> list[SampleGroup]:
        """A group after the next chunk of samples, in parts where its images go on in different ways."""
        if group.done:
            return [group]
        start, estimate, clean = group.drawn, group.estimate, group.clean
        stop = self._stop(start, max(1, rows // len(group.images)))
        views = self._views(group.images, group.level, start, stop)
        samples, logits = self._attributions(views, group, pass_size)
        estimate.add(samples, clean.weights(logits, estimate.target) if clean and self.weighted else None)
        if clean is not None and start < _FIRST:
            seen = clean.survival(logits[: _FIRST - start]).sum(0)
            group = replace(group, survived=group.survived + seen.to(group.survived))
            if group.drawn >= self.limit:  # most likely this was all: the device goes on while the host asks whether
                estimate.accumulator.significant()
        return self._sorted(group, start, pass_size, rows)

    def _sorted(self, group: SampleGroup, start: int, pass_size: PassSize, rows: int) -> list[SampleGroup]:
        """Images whose views left the distribution start again around a narrower rung; settled ones are done."""
        parts: list[SampleGroup] = []
        first = min(_FIRST, self.limit)
        if group.clean is not None and group.level < len(self.narrower) and start < first <= group.drawn:
            leave = group.survived < _SURVIVES * first
            parts += self._narrowed(group, leave.nonzero()[:, 0], pass_size, rows)
            group = group.select((~leave).nonzero()[:, 0]) if bool(leave.any()) else group
        if self.samples == "auto" and group.drawn < self.limit:
            done = group.estimate.has_converged(ENOUGH)
            if bool(done.any()) and group.drawn >= _FIRST:
                parts.append(group.select(done.nonzero()[:, 0], done=True))
                group = group.select((~done).nonzero()[:, 0])
        return [*parts, *([replace(group, done=group.drawn >= self.limit)] if len(group.where) else [])]

    def _narrowed(self, group: SampleGroup, leave: Tensor, pass_size: PassSize, rows: int) -> list[SampleGroup]:
        """Some images of a group once more from the beginning, in the next narrower neighbourhood."""
        if not len(leave):
            return []
        estimate = replace(
            group.estimate, accumulator=self.reducer.accumulator(), target=group.estimate.target.select(leave)
        )
        nothing = torch.zeros_like(group.survived[leave])
        fresh = group.select(leave, estimate=estimate, level=group.level + 1, survived=nothing)
        return self._advanced(fresh, pass_size, rows)

    def _stop(self, start: int, at_once: int) -> int:
        """Where the next chunk ends: where something is decided, if not all samples fit into one chunk anyway."""
        if self._compiled is not None and self.samples != "auto":  # chunks of one size, for which one graph is made
            return min(start + even_chunk_size(self.limit, at_once), self.limit)
        marks = range(_FIRST, self.limit, _STEP) if self.samples == "auto" else [_FIRST] if self.narrower else []
        whole = at_once >= self.limit and self.samples != "auto"
        end = self.limit if whole else min([mark for mark in marks if start < mark < self.limit] or [self.limit])
        chunks = -(-(end - start) // at_once)
        return start + -(-(end - start) // chunks)

    def _attributions(self, views: Views, group: SampleGroup, pass_size: PassSize) -> tuple[Tensor, Tensor]:
        """One sample a view, ``[n, b, K, C, H, W]``, and its logits ``[n, b, classes]``."""
        images, target = group.images, group.estimate.target
        rows = views.apply(images).flatten(0, 1)  # x_t = tau(x + eps): [n * b, C, H, W]
        wanted = self._seen(target, views, images)

        def effective(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return self._effective(rows[start:stop], wanted.part(start, stop), once=group.part)

        parts = zip(*pass_size.run_chunks(effective, len(rows)), strict=True)
        whole = (part[0] if len(part) == 1 else torch.cat(part) for part in parts)
        weight, logits = (part.unflatten(0, (len(views), len(images))) for part in whole)
        pulled = views.pull_back(weight.flatten(1, -4)).reshape(weight.shape)  # eq. (8) inside
        return pulled * images.unsqueeze(1), logits  # eq. (9)

    def _seen(self, target: Target, views: Views, images: Tensor) -> Target:
        """The target of each view; the place that a score looks at moves with the image."""
        wanted, place = target.repeat(len(views)), getattr(target.score, "place", None)
        if place is None:
            return wanted
        size = (images.shape[-2], images.shape[-1])
        moved = views.moved(place(size).to(images.device, images.dtype))  # [n, H, W]
        return replace(wanted, places=moved.repeat_interleave(len(images), 0))

    def _effective(self, rows: Tensor, target: Target, *, once: bool) -> tuple[Tensor, Tensor]:
        """W ``[n, K, C, H, W]`` and logits of each view."""
        if self._compiled is None:
            passed = self._recorded_model.gradient(rows, target, self.rules, once=once)
            return passed.weight, passed.logits
        return self._compiled(rows, target)

    def _resolve_target(self, images: Tensor, target: Target, pass_size: PassSize) -> Target:
        if self._compiled is None:
            return super()._resolve_target(images, target, pass_size)
        if target.score is not None:
            raise TargetError("a compiled graph explains classes; leave compiled out to explain a score function")
        classes = self._recorded_model.classes(images) if target.is_resolved else None
        if classes is None:
            return target.resolve(self._said(images, pass_size))
        return target.resolve(images.new_empty(len(images), classes))  # the graph checks no ranges

    def _said(self, images: Tensor, pass_size: PassSize) -> Tensor:
        """The logits of the images themselves."""
        if self._compiled is None:
            return clean_logits(self.model, images, pass_size, autocast=self.autocast)
        logits = self._compiled.logits
        return torch.cat(pass_size.run_chunks(lambda start, stop: logits(images[start:stop]), len(images)))

    def _views(self, images: Tensor, level: int, start: int, stop: int) -> Views:
        """The draws ``start`` to ``stop``; all are kept for the next batch, if they are not too large."""
        shape = tuple(images.shape[1:])
        form = (shape, images.device, images.dtype)
        views = self._kept.get((level, *form))
        if views is None:
            each = math.prod(shape) * images.element_size() + math.prod(shape[-2:]) * _READ_BYTES
            kept = self.limit * each <= _KEPT_BYTES
            drawn = {"start": 0, "stop": self.limit} if kept else {"start": start, "stop": stop}
            views = self.levels[level].views(
                shape, samples=self.limit, seed=self.seed, device=images.device, dtype=images.dtype, **drawn
            )
            if not kept:
                return views
            for other in [key for key in self._kept if key[1:] != form]:
                del self._kept[other]
            self._kept[(level, *form)] = views
        return views.part(start, stop)


def _limit(samples: int | str, limit: int) -> int:
    """The most views of an image."""
    if samples == "auto":
        return check_at_least_one("limit", limit)
    if not isinstance(samples, int) or isinstance(samples, bool):
        raise OptionError(f"samples is {samples!r}; give a number, or 'auto'")
    return check_at_least_one("samples", samples)


@METHODS.register("equivariant")
class Equivariant(DAVE):
    """The effective transformation averaged over spatial views only (eq. (6)), times the input."""

    info = MethodInfo(
        "Effective transformation, averaged over flips, rotations and shifts without noise, times the input.",
        "Wróbel et al., ICML 2026, eq. (6)",
        "1 + T forward, T backward",
        unit="logit",
    )
    fixed_options = tuple(NOISE_SWITCHES)

    def __init__(
        self,
        model: nn.Module,
        samples: int | Literal["auto"] | None = None,
        seed: int = 0,
        preset: str = "paper",
        **options: Any,
    ) -> None:
        for name in NOISE_SWITCHES:
            if name in options:
                raise OptionError(f"equivariant has no noise, so it takes no {name}; use dave for noise")
        super().__init__(model, samples, seed, preset, **{"reducer": Mean(), **options}, noise="none")


@METHODS.register("effective")
class Effective(Method):
    """The effective transformation alone (eq. (4)), times the input."""

    info = MethodInfo(
        "Input times the gradient with all operators frozen.",
        "Wróbel et al., ICML 2026, eq. (4)",
        "1 forward, 1 backward",
        unit="logit",
    )

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return multiply_by_input(self._gradient(images, target, EFFECTIVE), images, target)
