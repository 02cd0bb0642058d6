"""DAVE: the effective transformation averaged over a neighbourhood of the image, times the image (eq. (8), (9))."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.errors import OptionError, TargetError
from dave_vit.intercept import RuleSet
from dave_vit.methods.base import METHODS, Explanation, Method, MethodInfo, at_least_one, joined, times, times_input
from dave_vit.methods.chunks import Passes, clean_logits, even
from dave_vit.methods.presets import NOISE_SWITCHES, PRESETS
from dave_vit.methods.sampling import Estimate
from dave_vit.neighborhood import Neighborhood, Views
from dave_vit.reduce import REDUCERS, Mean, Reducer
from dave_vit.rules import EFFECTIVE
from dave_vit.run.compiled import CompiledGradient
from dave_vit.run.lean import LeanModel
from dave_vit.targets import Target, TargetLike

_KEPT_BYTES = 128 * 2**20  # draws are kept between batches up to this size


@METHODS.register("dave")
class DAVE(Method):
    """Distribution-aware attribution via ViT gradient decomposition.

    Args:
        model: any module that maps inputs to logits.
        samples: views of each image, T.
        seed: the same seed gives the same map, whatever the batch and the chunk.
        preset: "default", "paper" or "official"; the following arguments change single points of it.
        neighborhood: where views are drawn.
        reducer: how samples become one map: a reducer, or the name of one.
        rules: the rule set of the effective transformation.
        chunk: views in one forward pass; halved by itself where memory does not suffice.
        autocast: run the model under autocast, for example ``torch.bfloat16``.
        compiled: compile forward and backward pass into one graph (worth it for many images of one size).
        switches: single switches of the neighbourhood, such as ``rotation=0`` or ``noise_level=0.2``.

    Example:
        >>> dave = DAVE(model, samples=50)
        >>> attribution = dave.attribute(images)
        >>> for explanation in dave.refine(images):
        ...     show(explanation.map, explanation.standard_error)
    """

    info = MethodInfo(
        "Effective transformation, averaged over flips, rotations, shifts and noise, times the input.",
        "Wróbel et al., ICML 2026",
        "1 + T forward, T backward",
    )

    def __init__(
        self,
        model: nn.Module,
        samples: int = 50,
        seed: int = 0,
        preset: str = "default",
        *,
        neighborhood: Neighborhood | None = None,
        reducer: Reducer | str | None = None,
        rules: RuleSet | None = None,
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
        compiled: bool = False,
        **switches: Any,
    ) -> None:
        super().__init__(model, chunk=chunk, autocast=autocast)
        chosen = PRESETS[preset](model)
        chosen = replace(chosen, neighborhood=neighborhood or chosen.neighborhood).switched(switches)
        self.neighborhood = chosen.neighborhood
        self.reducer: Reducer = REDUCERS[reducer]() if isinstance(reducer, str) else reducer or chosen.reducer
        self.rules = rules or chosen.rules
        self.postprocess = chosen.postprocess
        self.samples, self.seed = at_least_one("samples", samples), seed
        self._kept: dict[tuple[Any, ...], Views] = {}
        self._compiled = CompiledGradient(model, self.rules, autocast) if compiled else None
        self._lean = LeanModel(model, autocast) if self._compiled is None else self._compiled.lean

    @torch.inference_mode(mode=False)
    def refine(self, inputs: Tensor, target: TargetLike = None) -> Iterator[Explanation]:
        """The explanation after each chunk of samples; the last one equals ``explain``."""
        images, wanted, passes = self._opened(inputs, target)
        size, at_once = passes.rows, passes.samples(images)
        runs = [
            self._estimates(images[start : start + size], wanted.part(start, start + size), passes, at_once)
            for start in range(0, len(images), size)
        ]
        for estimates in zip(*runs, strict=True):
            yield joined([estimate.explanation() for estimate in estimates])

    def _explain(self, images: Tensor, target: Target, passes: Passes) -> Explanation:
        *_, last = self._estimates(images, target, passes, passes.samples(images))
        return last.explanation()

    def _estimates(self, images: Tensor, target: Target, passes: Passes, at_once: int) -> Iterator[Estimate]:
        """The estimate of some images, again after each chunk of samples."""
        known = self._resolved(images, target, passes)
        estimate = Estimate(self.reducer.accumulator(), known, self.postprocess, tuple(images.shape[1:-3]))
        at_once = even(self.samples, at_once)
        for start in range(0, self.samples, at_once):
            views = self._views(images, start, min(start + at_once, self.samples))
            estimate.add(self._attributions(views, images, estimate.target, passes))
            yield estimate

    def _attributions(self, views: Views, images: Tensor, target: Target, passes: Passes) -> Tensor:
        """One sample a view: ``[n, b, C, H, W]``, or ``[n, b, K, C, H, W]``."""
        rows = views.apply(images).flatten(0, 1)  # x_t = tau(x + eps): [n * b, C, H, W]
        wanted = self._seen(target, views, images)

        def effective(start: int, stop: int) -> Tensor:
            return self._effective(rows[start:stop], wanted.part(start, stop))

        weight = torch.cat(passes.run(effective, len(rows))).unflatten(0, (len(views), len(images)))
        pulled = views.pull_back(weight.flatten(1, -4)).reshape(weight.shape)  # eq. (8) inside
        return times(pulled, images, target)  # eq. (9)

    def _seen(self, target: Target, views: Views, images: Tensor) -> Target:
        """The target of each view; the place that a score looks at moves with the image."""
        wanted, place = target.repeated(len(views)), getattr(target.score, "place", None)
        if place is None:
            return wanted
        size = (images.shape[-2], images.shape[-1])
        moved = views.moved(place(size).to(images.device, images.dtype))  # [n, H, W]
        return replace(wanted, places=moved.repeat_interleave(len(images), 0))

    def _effective(self, rows: Tensor, target: Target) -> Tensor:
        """W of each view."""
        if self._compiled is None:
            return self._lean.gradient(rows, target, self.rules).weight
        weight, _ = self._compiled(rows, target)  # [n, K, C, H, W]
        return weight if target.several else weight[:, 0]

    def _resolved(self, images: Tensor, target: Target, passes: Passes) -> Target:
        if self._compiled is None:
            return super()._resolved(images, target, passes)
        if target.score is not None:
            raise TargetError("a compiled graph explains classes; leave compiled out to explain a score function")
        classes = self._lean.classes(images) if target.known else None
        if classes is None:
            return target.resolve(clean_logits(self.model, images, passes))
        return target.resolve(images.new_empty(len(images), classes))  # the graph checks no ranges

    def _views(self, images: Tensor, start: int, stop: int) -> Views:
        """The draws ``start`` to ``stop``; all are kept for the next batch, if they are not too large."""
        shape = tuple(images.shape[1:])
        key = (shape, images.device, images.dtype)
        views = self._kept.get(key)
        if views is None:
            kept = self.samples * math.prod(shape) * images.element_size() <= _KEPT_BYTES
            drawn = {"start": 0, "stop": self.samples} if kept else {"start": start, "stop": stop}
            views = self.neighborhood.views(
                shape, samples=self.samples, seed=self.seed, device=images.device, dtype=images.dtype, **drawn
            )
            if not kept:
                return views
            self._kept.clear()
            self._kept[key] = views
        return views.part(start, stop)


@METHODS.register("equivariant")
class Equivariant(DAVE):
    """The effective transformation averaged over spatial views only (eq. (6)), times the input."""

    info = MethodInfo(
        "Effective transformation, averaged over flips, rotations and shifts without noise, times the input.",
        "Wróbel et al., ICML 2026, eq. (6)",
        "1 + T forward, T backward",
    )
    settled = tuple(NOISE_SWITCHES)

    def __init__(
        self, model: nn.Module, samples: int = 50, seed: int = 0, preset: str = "paper", **options: Any
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
    )

    def _explain(self, images: Tensor, target: Target, passes: Passes) -> Explanation:
        return times_input(self._gradient(images, target, EFFECTIVE), images, target)
