"""Sampling: the running estimate, and as many samples as each image needs, from the widest neighbourhood that fits it.

Images of a chunk start as one group in the widest neighbourhood. After the first samples, images whose predicted class
did not survive restart in the next narrower one, as a group of their own. With ``is_auto``, images whose estimate has
converged stop early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.fast.cuda_graphs import Captures
from dave_vit.engine.fingerprint import confirm_fingerprints
from dave_vit.engine.targets import Opponents, Target
from dave_vit.methods.explanation import ENOUGH, Explanation, join_explanations
from dave_vit.methods.pass_size import even_chunk_size
from dave_vit.models.adapter import do_classes_compete
from dave_vit.reduce import Accumulator, Reducer


@dataclass(frozen=True)
class CleanPrediction:
    """Prediction on each clean image.

    Attributes:
        predicted: the likeliest class, ``[b]``.
        compete: whether the classes compete, ``[b]``; else each logit stands for itself.
        probability: of the predicted class, ``[b]``.
        explained: probability of each explained class, ``[b, K]``; K is 0 without a target.
    """

    predicted: Tensor
    compete: Tensor
    probability: Tensor
    explained: Tensor

    @classmethod
    def of(cls, model: nn.Module, logits: Tensor, target: Target | None = None) -> CleanPrediction:
        """Compute it from the logits of the clean images ``[b, classes]``, and the resolved target."""
        predicted, compete = logits.argmax(1), do_classes_compete(model, logits)
        columns = torch.cat([predicted.unsqueeze(1), *([] if target is None else [target.class_indices])], 1)
        chances = probabilities(logits.unsqueeze(0), columns, compete)[0]
        return cls(predicted, compete, chances[:, 0], chances[:, 1:])

    def select(self, images: Tensor) -> CleanPrediction:
        """Select images by index."""
        return CleanPrediction(*(part[images.to(part.device)] for part in vars(self).values()))

    def contrast(self, target: Target, logits: Tensor) -> Target:
        """Contrast the target with its rivals in those images whose classes compete, and resolve it."""
        against: Opponents = tuple("rivals" if compete else None for compete in self.compete.tolist())
        return replace(target, against=against).resolve(logits)

    def survival(self, logits: Tensor) -> Tensor:
        """Return how much of the predicted class's probability is left on views ``[n, b, classes]``: ``[n, b]``."""
        left = probabilities(logits, self.predicted.unsqueeze(1), self.compete)[..., 0]
        return left / self.probability.clamp(min=torch.finfo(left.dtype).tiny)

    def weights(self, logits: Tensor, target: Target) -> Tensor:
        """Return how much each view counts: the probability of the explained classes on it, ``[n, b * K]``."""
        return probabilities(logits, target.class_indices, self.compete).flatten(1)


def probabilities(logits: Tensor, columns: Tensor, compete: Tensor) -> Tensor:
    """Compute probabilities of classes ``[b, K]`` from logits ``[n, b, classes]``: ``[n, b, K]``.

    Softmax where classes compete, sigmoid where they do not.
    """
    wide = logits.to(precise_dtype(logits.device))
    picked = columns.expand(len(logits), *columns.shape)
    shared, alone = wide.softmax(2).gather(2, picked), wide.gather(2, picked).sigmoid()
    return torch.where(compete[:, None], shared, alone)


@dataclass(eq=False)
class SampleEstimate:
    """Running estimate of the attributions of some images.

    Attributes:
        reducer: how samples become one map.
        target: resolved.
        clean: evidence of the clean images ``[b, K, ..., H, W]``, for reducers that use it.
        postprocess: of the map, where the method prescribes one.
        frames: ``(T,)`` where clips are explained: each frame has a map of its own.
        captures: passes of a GPU; all samples at once are reduced by one of them.
        accumulator: over samples ``[n, b * K, C, H, W]``; a new one has none yet.
        count: number of samples so far.
    """

    reducer: Reducer
    target: Target
    clean: Tensor | None = None
    postprocess: Callable[[Tensor], Tensor] | None = None
    frames: tuple[int, ...] = ()
    captures: Captures | None = None

    def __post_init__(self) -> None:
        self._clean_maps = [] if self.clean is None else [self.clean.flatten(0, -5)]  # a row for each row of samples
        self.accumulator, self.count = self._make_accumulator(*self._clean_maps), 0
        self._results: tuple[Tensor, ...] | None = None  # of all samples, where they came at once

    def restart(self, images: Tensor) -> SampleEstimate:
        """Select images by index, to start with them anew."""
        clean = None if self.clean is None else self.clean[images]
        return replace(self, target=self.target.select(images), clean=clean)

    def _make_accumulator(self, *clean: Tensor) -> Accumulator:
        make: Callable[..., Accumulator] = self.reducer.accumulator
        return make(*clean)

    def add(self, samples: Tensor, weights: Tensor | None = None, *, are_all: bool = False) -> None:
        """Accumulate samples.

        Args:
            samples: attributions ``[n, b, K, C, H, W]``; clips have T before C.
            weights: how much each sample counts, ``[n, b * K]``; all the same by default.
            are_all: whether no others came before or will come.
        """
        self.count += len(samples)
        flat = samples.flatten(1, -4)  # [n, b * K * T, C, H, W]
        each = None if weights is None else weights.repeat_interleave(math.prod(self.frames), 1)
        if are_all and self.captures is not None:
            self._results = self._reduce_at_once(self.captures, flat, each)
        else:
            self.accumulator.update(flat, each)

    def _reduce_at_once(self, captures: Captures, samples: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        """Return the results of all samples, by a CUDA graph where Python takes longer than the GPU."""
        inputs = [samples.transpose(0, 1), *([] if weights is None else [weights.T]), *self._clean_maps]

        def reduce(samples: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            each, clean = (None, rest) if weights is None else (rest[0].T, rest[1:])
            accumulator = self._make_accumulator(*clean)
            accumulator.update(samples.transpose(0, 1), each)
            return _results_of(accumulator)

        return captures.run("reduce", lambda _: reduce, inputs, partial(reduce, *inputs), has_model=False)

    def select(self, images: Tensor) -> SampleEstimate:
        """Select images by index, to continue with them alone."""
        maps = math.prod(self._maps)
        rows = (images[:, None] * maps + torch.arange(maps, device=images.device)).flatten()
        part = self.restart(images)
        part.count = self.count
        if self._results is None:
            part.accumulator = self.accumulator.select(rows)
        else:
            part._results = tuple(one[rows] for one in self._results)
        return part

    def has_converged(self, share: float) -> Tensor:
        """Return whether at most this share of the energy of each of an image's maps is sampling error, ``[b]``."""
        converged = self.accumulator.error_share() <= share  # [b * K * T]
        return converged.reshape(-1, math.prod(self._maps)).all(1)

    def explanation(self) -> Explanation:
        """Return the explanation after the samples so far."""
        parts = self._results or _results_of(self.accumulator)
        attribution, error, significant, mean = (part.unflatten(0, (-1, *self._maps)) for part in parts)  # [b, K, T]
        return Explanation(
            attribution,
            self.target.indices,
            error,
            samples=self.count,
            postprocess=self.postprocess,
            against=self.target.against,
            significant=significant.any(-1) if self.frames else significant,
            drawn=torch.full((len(attribution),), self.count, device=attribution.device),
            mean=mean,
            is_signed=self.accumulator.is_signed,
        )

    @property
    def _maps(self) -> tuple[int, ...]:
        """Number of maps of an image: ``(K,)``, or ``(K, T)`` for clips."""
        return (self.target.count, *self.frames)


def _results_of(total: Accumulator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return total.attribution(), total.standard_error(), total.significant(), total.mean()


_FIRST = 8  # samples after which it is decided whether the neighbourhood fits, and the fewest with is_auto
_STEP = 4  # samples between two convergence checks
_SURVIVES = 0.5  # share of the predicted class's probability that must be left on the first samples


@dataclass(frozen=True, eq=False)
class SampleGroup:
    """Images of a chunk that are sampled alike.

    Attributes:
        where: their indices in the chunk, ``[g]``.
        images: ``[g, C, H, W]``.
        clean: the model's prediction on them, where it is needed.
        estimate: of their samples so far.
        level: index of their neighbourhood.
        survived: sum over the first samples of the predicted class's probability, relative to the clean image's.
        done: whether they need no more samples.
        is_split: whether they were split from a larger group, so that batches of this size may not come again.
    """

    where: Tensor
    images: Tensor
    clean: CleanPrediction | None
    estimate: SampleEstimate
    level: int
    survived: Tensor
    done: bool = False
    is_split: bool = False

    @classmethod
    def initial(cls, images: Tensor, clean: CleanPrediction | None, estimate: SampleEstimate) -> SampleGroup:
        """Return the group of all images before the first sample."""
        where = torch.arange(len(images), device=images.device)
        return cls(where, images, clean, estimate, 0, torch.zeros(len(images), device=images.device))

    @property
    def drawn(self) -> int:
        """Number of samples so far."""
        return self.estimate.count

    def select(self, images: Tensor, **changes: Any) -> SampleGroup:
        """Select images by index."""
        fields: dict[str, Any] = {name: getattr(self, name)[images] for name in ("where", "images", "survived")}
        fields["clean"] = None if self.clean is None else self.clean.select(images)
        fields["estimate"] = changes.get("estimate") or self.estimate.select(images)
        fields["is_split"] = self.is_split or len(images) < len(self.where)
        return replace(self, **{**fields, **changes})

    def explanation(self) -> Explanation:
        """Return the explanation after the samples so far."""
        level = torch.full_like(self.where, self.level)
        probability = None if self.clean is None else self.clean.explained
        return replace(self.estimate.explanation(), neighborhood_level=level, probability=probability)


Draw = Callable[[SampleGroup, int, int], tuple[Tensor, Tensor]]
"""Draw samples ``start`` to ``stop`` of a group: attributions ``[n, g, K, C, H, W]`` and logits ``[n, g, classes]``."""


@dataclass(frozen=True)
class AdaptiveSampler:
    """Decides which samples of which images are drawn.

    Attributes:
        limit: the most samples of an image.
        levels: number of neighbourhoods, from the widest to the narrowest.
        is_weighted: whether a sample counts by the probability of the explained class on it.
        is_auto: whether images stop once their estimate has converged.
        equal_chunks: draw chunks of one size, for which one compiled graph suffices.
    """

    limit: int
    levels: int
    is_weighted: bool
    is_auto: bool
    equal_chunks: bool

    def run(self, group: SampleGroup, draw: Draw, rows: int) -> Iterator[list[SampleGroup]]:
        """Yield all groups after each chunk of samples, until every image is done.

        Args:
            group: all images, before the first sample.
            draw: draws the samples.
            rows: images times samples of a chunk; fixed for the whole run, so that the draws do not depend on memory.
        """
        groups = [group]
        while not all(group.done for group in groups):
            groups = [part for group in groups for part in self._draw_chunk(group, draw, rows)]
            yield groups

    def _draw_chunk(self, group: SampleGroup, draw: Draw, rows: int) -> list[SampleGroup]:
        """Draw the next chunk of samples of a group; returns it in parts where its images continue differently."""
        if group.done:
            return [group]
        start, estimate, clean = group.drawn, group.estimate, group.clean
        end = self._chunk_end(start, max(1, rows // len(group.images)))
        samples, logits = draw(group, start, end)
        weights = clean.weights(logits, estimate.target) if clean and self.is_weighted else None
        estimate.add(samples, weights, are_all=end - start == self.limit)
        if clean is not None and start < _FIRST:
            survived = clean.survival(logits[: _FIRST - start]).sum(0)
            group = replace(group, survived=group.survived + survived.to(group.survived))
            confirm_fingerprints()
        return self._partition(group, start, draw, rows)

    def _partition(self, group: SampleGroup, start: int, draw: Draw, rows: int) -> list[SampleGroup]:
        """Split a group: images that left the model's domain restart, converged ones are done, the others continue."""
        parts: list[SampleGroup] = []
        first = min(_FIRST, self.limit)
        if group.clean is not None and group.level < self.levels - 1 and start < first <= group.drawn:
            leaves = group.survived < _SURVIVES * first
            if bool(leaves.any()):
                parts += self._restart_narrower(group, leaves.nonzero()[:, 0], draw, rows)
                group = group.select((~leaves).nonzero()[:, 0])
        is_due = group.drawn in range(_FIRST, self.limit, _STEP)  # whatever the chunks are
        if self.is_auto and is_due:
            converged = group.estimate.has_converged(ENOUGH)
            if bool(converged.any()):
                parts.append(group.select(converged.nonzero()[:, 0], done=True))
                group = group.select((~converged).nonzero()[:, 0])
        return [*parts, *([replace(group, done=group.drawn >= self.limit)] if len(group.where) else [])]

    def _restart_narrower(self, group: SampleGroup, images: Tensor, draw: Draw, rows: int) -> list[SampleGroup]:
        """Restart images of a group in the next narrower neighbourhood."""
        survived = torch.zeros_like(group.survived[images])
        fresh = group.select(images, estimate=group.estimate.restart(images), level=group.level + 1, survived=survived)
        return self._draw_chunk(fresh, draw, rows)

    def _chunk_end(self, start: int, at_once: int) -> int:
        """Return where the next chunk ends: at the next decision, unless all samples fit into one chunk anyway."""
        if self.equal_chunks:
            return min(start + even_chunk_size(self.limit, at_once), self.limit)
        decisions = range(_FIRST, self.limit, _STEP) if self.is_auto else [_FIRST] if self.levels > 1 else []
        # Where a pass has room for far more, what samples of images that restart cost in vain does not count.
        whole = at_once >= 2 * self.limit and not self.is_auto
        ahead = [] if whole else [decision for decision in decisions if start < decision < self.limit]
        end = min(ahead, default=self.limit)
        chunks = -(-(end - start) // at_once)
        return start + -(-(end - start) // chunks)


def merge_groups(groups: list[SampleGroup]) -> Explanation:
    """Join the explanations of all groups in the order of their images."""
    explanation = join_explanations([group.explanation() for group in groups])
    if len(groups) == 1:
        return explanation
    return explanation.select(torch.cat([group.where for group in groups]).argsort())
