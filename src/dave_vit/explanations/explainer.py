"""A model and a method, ready to explain one input after another, and what is explained of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dave_vit.engine.targets import Contrast, TargetLike
from dave_vit.errors import OutputError
from dave_vit.methods import Explanation, Method, create_method
from dave_vit.models import Adapter


@dataclass(frozen=True)
class Question:
    """What is explained of each picture; the fields are options of `dave explain`, None or False where not given."""

    target: str | None = None
    score: str | None = None
    boxes: bool = False
    threshold: float | None = None
    prompt: str | None = None
    words: tuple[int | str, ...] | None = None
    answer: str | None = None
    max_tokens: int | None = None

    @property
    def target_label(self) -> str:
        """The classes, for the names of files; empty for the default."""
        return "" if self.target in (None, "top1") else str(self.target)


class Explainer:
    """A model and a method.

    Args:
        model: the model, from `load_model`.
        method: name of the method.
        weights: file of the weights, for records.
        against: contrast for classes: "rivals", a class by name or index, or "none"; None for the method's default.
        options: options of the method.

    Attributes:
        on_progress: called with the share of samples that are done, 0 to 1, after each chunk of them.
    """

    def __init__(
        self,
        model: Adapter,
        method: str = "dave",
        *,
        weights: str | None = None,
        against: str | int | None = None,
        **options: Any,
    ) -> None:
        self.model, self.name = model, method
        self.weights, self.against = weights, against
        self.options = options
        self.method: Method = create_method(method, model, **options)
        self.on_progress: Callable[[float], None] = lambda share: None

    def with_model(self, model: Adapter, *, against: str | int | None) -> Explainer:
        """Return the same method on another model, with another contrast."""
        other = Explainer(model, self.name, weights=self.weights, against=against, **self.options)
        other.on_progress = self.on_progress
        return other

    @property
    def max_samples(self) -> int:
        """How many samples the method draws at most; 1 for methods that draw none."""
        return int(getattr(self.method, "limit", getattr(self.method, "samples", 1)))

    def refine(self, inputs: Tensor, target: TargetLike) -> Iterator[tuple[Explanation, float]]:
        """Yield the explanation after each chunk of samples, with the seconds until then.

        Methods that draw no samples yield one.
        """
        start = time.perf_counter()
        target = target if self.against is None else Contrast(target, self.against)  # type: ignore[arg-type]
        refine = getattr(self.method, "refine", None)
        for explanation in refine(inputs, target) if refine else [self.method.explain(inputs, target)]:
            if inputs.is_cuda:
                torch.cuda.synchronize(inputs.device)
            if not explanation.attribution.isfinite().all():
                raise OutputError(f"the map of {self.name} is not finite; give options nearer to the defaults")
            self.on_progress(min(1.0, explanation.samples / self.max_samples))
            yield explanation, time.perf_counter() - start

    def explain(self, inputs: Tensor, target: TargetLike) -> tuple[Explanation, float]:
        """Return the explanation after all samples, with the seconds it took."""
        *_, last = self.refine(inputs, target)
        return last
