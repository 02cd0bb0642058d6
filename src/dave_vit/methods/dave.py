"""DAVE: the effective transformation averaged over a neighbourhood of the image, times the image (eq. (8), (9))."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dave_vit._internal.schema import Count, check_choice, check_type
from dave_vit.engine import EFFECTIVE, RuleSet, Target
from dave_vit.engine.fast.compiled import CompiledGradient, RecordedGradient
from dave_vit.engine.fingerprint import ModelChanged, cache_fingerprints, confirm_fingerprints
from dave_vit.engine.targets import TargetLike
from dave_vit.errors import OptionError, TargetError
from dave_vit.methods.base import METHODS, Inputs, Method, MethodInfo, check_option_names, multiply_by_input
from dave_vit.methods.clean_evidence import CleanEvidence, keep_target
from dave_vit.methods.explanation import Explanation, join_explanations
from dave_vit.methods.pass_size import Memory, PassSize
from dave_vit.methods.presets import NOISE_SWITCHES, SWITCHES, Against, Preset, load_preset
from dave_vit.methods.sampling import AdaptiveSampler, CleanPrediction, SampleEstimate, SampleGroup, merge_groups
from dave_vit.neighborhood import Neighborhood, Views
from dave_vit.neighborhood.views import ViewCache
from dave_vit.reduce import REDUCERS, Mean, Reducer, uses_clean

Samples = Count | Literal["auto"]


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
        chunk: most views in one forward pass; halved by itself where memory does not suffice.
        memory: most memory of a pass: "8GiB", bytes, or a share of what is free; half of a GPU's, up to 16 GiB.
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
        "Relevance averaged over flips, rotations, shifts and noise, where significant, sharpened by the clean image.",
        "Wróbel et al., ICML 2026; preset default",
        "2 + T forward, 2 + T backward",
        unit="logit",
    )

    def __init__(
        self,
        model: nn.Module,
        samples: Samples | None = None,
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
        memory: Memory | None = None,
        autocast: torch.dtype | None = None,
        compiled: bool = False,
        **switches: Any,
    ) -> None:
        super().__init__(model, chunk=chunk, memory=memory, autocast=autocast)
        chosen = _load_preset(preset, model, neighborhood, switches)
        self.neighborhood, self.narrower = chosen.neighborhood, chosen.narrower
        self.reducer: Reducer = REDUCERS[reducer]() if isinstance(reducer, str) else reducer or chosen.reducer
        self.rules, self.postprocess, self.seed = rules or chosen.rules, chosen.postprocess, seed
        self.weighted = chosen.weighted if weighted is None else weighted
        if self.weighted and not getattr(self.reducer, "takes_weights", True):
            raise OptionError(f"{type(self.reducer).__name__} takes no weights; add weighted=False, or another reducer")
        against = chosen.against if against is None else against
        self.against: Against = check_choice("against", against, get_args(Against))
        self.samples: Samples = chosen.samples if samples is None else samples
        check_type("samples", self.samples, Samples)
        check_type("limit", limit, Count | None)
        self.limit = (limit or chosen.samples) if isinstance(self.samples, str) else self.samples
        self._views = ViewCache(self.levels, self.limit, seed)
        self._is_compiled = compiled
        self._passes = (CompiledGradient if compiled else RecordedGradient)(model, self.rules, autocast)
        self._needs_clean = bool(self.weighted or self.narrower or self.against == "rivals")
        is_auto = self.samples == "auto"
        equal_chunks = compiled and not is_auto
        self._sampler = AdaptiveSampler(self.limit, len(self.levels), self.weighted, is_auto, equal_chunks)

    @property
    def levels(self) -> tuple[Neighborhood, ...]:
        """The neighbourhoods from the widest to the narrowest."""
        return (self.neighborhood, *self.narrower)

    @classmethod
    def options_for_budget(cls, budget: int, **options: Any) -> dict[str, Any]:
        """Return a sample count: one pass per view, and those of the clean image that the preset needs.

        Restarts in a narrower neighbourhood come on top.
        """
        name = options.get("preset") or inspect.signature(cls).parameters["preset"].default
        chosen = load_preset(name, nn.Identity())
        weighted, against = (options.get(name, getattr(chosen, name)) for name in ("weighted", "against"))
        needs_clean = bool(weighted or chosen.narrower or against == "rivals")
        on_clean = 2 if uses_clean(options.get("reducer") or chosen.reducer) else int(needs_clean)
        return {"samples": max(1, budget - on_clean)}

    @torch.inference_mode(mode=False)
    def refine(self, inputs: Inputs, target: TargetLike = None) -> Iterator[Explanation]:
        """Yield the explanation after each chunk of samples; the last one equals ``explain``."""
        images, normalised, pass_size = self._prepare(inputs, target)
        size = pass_size.rows
        runs = [
            map(merge_groups, self._draw(images[start : start + size], normalised.part(start, start + size), pass_size))
            for start in range(0, len(images), size)
        ]
        latest: list[Explanation | None] = [None] * len(runs)
        for step in zip_longest(*runs):
            latest = [new or old for new, old in zip(step, latest, strict=True)]
            explanation = join_explanations([each for each in latest if each is not None])
            yield self._finish(explanation, images, normalised)

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        def draw() -> list[SampleGroup]:
            *_, groups = self._draw(images, target, pass_size)
            return groups

        if self._passes.captures.are_used:  # the GPU computes while the model is checked
            with suppress(ModelChanged), cache_fingerprints(self.model):
                try:
                    groups = draw()
                finally:
                    confirm_fingerprints()
                return merge_groups(groups)
        with cache_fingerprints():
            return merge_groups(draw())

    def _draw(self, images: Tensor, target: Target, pass_size: PassSize) -> Iterator[list[SampleGroup]]:
        """Yield the images, grouped by how they are sampled, after each chunk of samples."""
        target, clean, evidence = self._resolve_on_clean(images, target, pass_size)
        frames = tuple(images.shape[1:-3])
        captures = self._passes.captures
        estimate = SampleEstimate(self.reducer, target, evidence, self.postprocess, frames, captures)

        def draw(group: SampleGroup, start: int, stop: int) -> tuple[Tensor, Tensor]:
            samples = self._attributions(self._views.views(group.images, group.level, start, stop), group, pass_size)
            captures.join()  # the evidence is there when the samples are
            return samples

        yield from self._sampler.run(SampleGroup.initial(images, clean, estimate), draw, pass_size.rows)

    def _attributions(self, views: Views, group: SampleGroup, pass_size: PassSize) -> tuple[Tensor, Tensor]:
        """Return one sample per view, ``[n, b, K, C, H, W]``, and the logits ``[n, b, classes]``."""
        images, target = group.images, group.estimate.target
        rows = views.apply(images).flatten(0, 1)  # x_t = tau(x + eps): [n * b, C, H, W]
        view_target = self._target_of_views(target, views, images)

        def effective(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return self._passes(rows[start:stop], view_target.part(start, stop), once=group.is_split)  # W, logits

        columns = zip(*pass_size.run_chunks(effective, len(rows)), strict=True)
        whole = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in columns)
        weight, logits = (part.unflatten(0, (len(views), len(images))) for part in whole)
        pulled = views.pull_back(weight.flatten(1, -4)).reshape(weight.shape)  # eq. (8) inside
        return pulled * images.unsqueeze(1), logits  # eq. (9)

    def _target_of_views(self, target: Target, views: Views, images: Tensor) -> Target:
        """Return the target of each view; the place that a score looks at moves with the image."""
        repeated, place = target.repeat(len(views)), getattr(target.score, "place", None)
        if place is None:
            return repeated
        size = (images.shape[-2], images.shape[-1])
        moved = views.move_mask(place(size).to(images.device, images.dtype))  # [n, H, W]
        return replace(repeated, places=moved.repeat_interleave(len(images), 0))

    def _resolve_on_clean(
        self, images: Tensor, target: Target, pass_size: PassSize
    ) -> tuple[Target, CleanPrediction | None, Tensor | None]:
        """Resolve the target on the clean images.

        Also returns the prediction on them, if views are compared with it, and their evidence, if the reducer uses it.
        """
        is_compared = self._needs_clean and target.score is None  # a score has no classes whose probability may survive
        if not is_compared:
            target = self._resolve_target(images, target, pass_size)
        resolve, evidence, logits = self._resolve_on_logits if is_compared else keep_target, None, None
        if uses_clean(self.reducer):
            clean_evidence = CleanEvidence(self, self.rules, self._passes)
            evidence, target, logits = clean_evidence.compute(images, target, pass_size, resolve)
        elif is_compared:
            logits = self._clean_logits(images, pass_size)
            target = resolve(target, logits)
        clean = None if logits is None or not is_compared else CleanPrediction.of(self.model, logits, target)
        return target, clean, evidence

    def _resolve_on_logits(self, target: Target, logits: Tensor) -> Target:
        """Resolve the target on logits ``[b, classes]`` of the clean images, against its rivals by preset."""
        is_decided = self.against == "none" or target.against is not None
        return target.resolve(logits) if is_decided else CleanPrediction.of(self.model, logits).contrast(target, logits)

    def _resolve_target(self, images: Tensor, target: Target, pass_size: PassSize) -> Target:
        if not self._is_compiled:
            return super()._resolve_target(images, target, pass_size)
        if target.score is not None:
            raise TargetError("a compiled graph explains classes; leave compiled out to explain a score function")
        classes = self._passes.recorded_model.count_classes(images) if target.is_resolved else None
        if classes is None:
            return target.resolve(self._clean_logits(images, pass_size))
        return target.resolve(images.new_empty(len(images), classes))  # the graph checks no ranges

    def _clean_logits(self, images: Tensor, pass_size: PassSize) -> Tensor:
        """Return the logits of the clean images, ``[b, classes]``."""
        logits = self._passes.logits
        return torch.cat(pass_size.run_chunks(lambda start, stop: logits(images[start:stop]), len(images)))


def _load_preset(name: str, model: nn.Module, neighborhood: Neighborhood | None, switches: dict[str, Any]) -> Preset:
    """Return a preset, in another neighbourhood or with single switches of it changed, where these are given."""
    chosen = load_preset(name, model)
    if switches.keys() - SWITCHES.keys():
        check_option_names("dave", switches)
    if neighborhood is not None:
        chosen = replace(chosen, neighborhood=neighborhood, narrower=())
    return chosen.with_switches(switches)


@METHODS.register("equivariant")
class Equivariant(DAVE):
    """Effective transformation, averaged over flips, rotations and shifts without noise, times the input."""

    info = MethodInfo(paper="Wróbel et al., ICML 2026, eq. (6)", passes="1 + T forward, T backward", unit="logit")
    fixed_options = tuple(NOISE_SWITCHES)

    def __init__(
        self, model: nn.Module, samples: Samples | None = None, seed: int = 0, preset: str = "paper", **options: Any
    ) -> None:
        for name in NOISE_SWITCHES:
            if name in options:
                raise OptionError(f"equivariant has no noise, so it takes no {name}; use dave for noise")
        super().__init__(model, samples, seed, preset, **{"reducer": Mean(), **options}, noise="none")


@METHODS.register("effective")
class Effective(Method):
    """Input times the gradient with all operators frozen."""

    info = MethodInfo(paper="Wróbel et al., ICML 2026, eq. (4)", passes="1 forward, 1 backward", unit="logit")

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return multiply_by_input(self._gradient(images, target, EFFECTIVE), images, target)
