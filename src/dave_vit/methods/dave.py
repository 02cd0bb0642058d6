"""DAVE: the effective transformation averaged over a neighbourhood of the image, times the image (eq. (8), (9))."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.errors import OptionError
from dave_vit.intercept import RuleSet
from dave_vit.methods.base import METHODS, Explanation, MethodInfo
from dave_vit.methods.chunked import Chunked, OnePass, pairs
from dave_vit.methods.presets import PRESETS
from dave_vit.neighborhood import Neighborhood, Noise, Views
from dave_vit.reduce import REDUCERS, Accumulator, Mean, Reducer
from dave_vit.rules import EFFECTIVE
from dave_vit.run.compiled import CompiledGradient
from dave_vit.run.gradient import effective_transformation
from dave_vit.targets import TargetLike

_KEPT_BYTES = 128 * 2**20  # draws are kept between batches up to this size


@dataclass(frozen=True)
class _Group:
    """Some images of a batch on their way through all samples."""

    inputs: Tensor  # [b, C, H, W]
    target: Tensor  # [b, K]
    accumulator: Accumulator  # over [n, b * K, C, H, W]


@METHODS.register("dave")
class DAVE(Chunked):
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
        if samples < 1:
            raise OptionError(f"samples is {samples}; it must be at least 1")
        chosen = PRESETS[preset](model)
        chosen = replace(chosen, neighborhood=neighborhood or chosen.neighborhood).switched(switches)
        self.neighborhood = chosen.neighborhood
        self.reducer: Reducer = REDUCERS[reducer]() if isinstance(reducer, str) else reducer or chosen.reducer
        self.rules = rules or chosen.rules
        self.postprocess = chosen.postprocess
        self.samples, self.seed = samples, seed
        self._kept: dict[tuple[Any, ...], Views] = {}
        self._compiled = CompiledGradient(model, self.rules, autocast) if compiled else None

    def explain(self, inputs: Tensor, target: TargetLike = None) -> Explanation:
        """Attributions, their standard error, and the explained classes."""
        groups, indices = self._groups(inputs, target)
        for _ in self._run(groups):
            pass
        return self._explanation(groups, indices)

    def refine(self, inputs: Tensor, target: TargetLike = None) -> Iterator[Explanation]:
        """The explanation after each chunk of samples; the last one equals ``explain``."""
        groups, indices = self._groups(inputs, target)
        for _ in self._run(groups):
            yield self._explanation(groups, indices)

    def _maps(self, images: Tensor, target: Tensor) -> Tensor:
        return self.explain(images, target).attribution

    @torch.inference_mode(mode=False)
    def _groups(self, inputs: Tensor, target: TargetLike) -> tuple[list[_Group], Tensor]:
        indices = self.resolve(inputs, target)  # once, on the clean image
        columns = indices.reshape(len(inputs), -1)  # [B, K]
        parts = pairs(inputs, columns, self._size(inputs))
        return [_Group(images, wanted, self.reducer.accumulator()) for images, wanted in parts], indices

    def _run(self, groups: list[_Group]) -> Iterator[None]:
        step = max(1, self._size(groups[0].inputs) // len(groups[0].inputs))
        for start in range(0, self.samples, step):
            for group in groups:
                group.accumulator.update(self._draw(group, start, min(start + step, self.samples)))
            yield

    @torch.inference_mode(mode=False)
    def _draw(self, group: _Group, start: int, stop: int) -> Tensor:
        """Attribution samples ``start`` to ``stop`` of some images: [n, b * K, C, H, W]."""
        images = group.inputs
        views = self._views(images, start, stop)
        seen = views.apply(images)  # x_t = tau(x + eps): [n, b, C, H, W]
        weight = self._effective(seen.flatten(0, 1), group.target.repeat(stop - start, 1))  # [n * b, K, C, H, W]
        count = group.target.shape[1]
        weight = weight.reshape(stop - start, len(images) * count, *images.shape[1:])
        return views.pull_back(weight) * images.repeat_interleave(count, 0)  # eq. (8) inside, eq. (9)

    def _views(self, images: Tensor, start: int, stop: int) -> Views:
        """The draws ``start`` to ``stop``; kept for the next batch, since drawing noise costs more than copying it."""
        shape = (images.shape[1], images.shape[2], images.shape[3])
        key = (shape, start, stop, images.device, images.dtype)
        if key not in self._kept:
            views = self.neighborhood.views(
                shape,
                samples=self.samples,
                seed=self.seed,
                start=start,
                stop=stop,
                device=images.device,
                dtype=images.dtype,
            )
            if self.samples * math.prod(shape) * images.element_size() > _KEPT_BYTES:
                return views
            if any(old[0] != shape or old[3:] != key[3:] for old in self._kept):
                self._kept.clear()
            self._kept[key] = views
        return self._kept[key]

    def _effective(self, seen: Tensor, target: Tensor) -> Tensor:
        """W of each view; a batch that does not fit is halved, with the same result."""
        try:
            if self._compiled is not None:
                return self._compiled(seen, target)
            return effective_transformation(self.model, seen, target, rules=self.rules, autocast=self.autocast)
        except (RuntimeError, MemoryError) as error:
            if len(seen) == 1 or not _out_of_memory(error):
                raise
        half = len(seen) // 2  # outside of the handler, so that the failed pass is freed first
        if seen.is_cuda:
            torch.cuda.empty_cache()
        self.chunk = half
        return torch.cat([self._effective(seen[:half], target[:half]), self._effective(seen[half:], target[half:])])

    def _explanation(self, groups: list[_Group], indices: Tensor) -> Explanation:
        attribution = torch.cat([group.accumulator.attribution() for group in groups])
        error = torch.cat([group.accumulator.standard_error() for group in groups])
        if indices.ndim == 2:
            attribution = attribution.reshape(*indices.shape, *attribution.shape[1:])
            error = error.reshape(*indices.shape, *error.shape[1:])
        return Explanation(attribution, indices, error, groups[0].accumulator.count, self.postprocess)


def _out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    known = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in text for part in known)


@METHODS.register("equivariant")
class Equivariant(DAVE):
    """The effective transformation averaged over spatial views only (eq. (6)), times the input."""

    info = MethodInfo(
        "Effective transformation, averaged over flips, rotations and shifts without noise, times the input.",
        "Wróbel et al., ICML 2026, eq. (6)",
        "1 + T forward, T backward",
    )

    def __init__(
        self, model: nn.Module, samples: int = 50, seed: int = 0, preset: str = "paper", **options: Any
    ) -> None:
        super().__init__(model, samples, seed, preset, **{"reducer": Mean(), **options})
        self.neighborhood = replace(self.neighborhood, noise=Noise("none"))


@METHODS.register("effective")
class Effective(OnePass):
    """The effective transformation alone (eq. (4)), times the input."""

    info = MethodInfo(
        "Input times the gradient with all operators frozen.",
        "Wróbel et al., ICML 2026, eq. (4)",
        "1 forward, 1 backward",
    )
    rules = EFFECTIVE
