"""A model and a method, ready to explain one input after another, and what is explained of each."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dave_vit._internal.environment import synchronized_time
from dave_vit.engine.targets import Contrast, TargetLike
from dave_vit.errors import OptionError, OutputError
from dave_vit.methods import METHODS, Explanation, Method, create_method
from dave_vit.methods.options import max_samples
from dave_vit.models import Adapter

STAGES = 24
"""About so many explanations are yielded while a map refines, where somebody watches it."""

_MANY_PASSES = 50  # from which on the time is estimated before
_SLOW = 20.0  # seconds from which on an estimate is reported


def chunk_for_stages(method: str, options: Mapping[str, Any]) -> int:
    """Return how many samples a method draws between two of about `STAGES` explanations.

    Raises:
        OptionError: the method draws no samples one after the other.
    """
    if not hasattr(METHODS[method], "refine"):
        raise OptionError(f"method {method!r} does not refine sample by sample; leave out --animate")
    return max(1, max_samples(method, options) // STAGES)


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
    together: tuple[str, ...] | None = None  # the other files of one prompt

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
        on_slow: called with an estimate of the time, once, before maps that take long.
        maps: how many maps are made in all, for the estimate.
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
        self.on_slow: Callable[[str], None] = lambda estimate: None
        self.maps = 1

    def with_model(self, model: Adapter, *, against: str | int | None) -> "Explainer":
        """Return the same method on another model, with another contrast."""
        other = Explainer(model, self.name, weights=self.weights, against=against, **self.options)
        other.on_progress, other.on_slow, other.maps = self.on_progress, self.on_slow, self.maps
        return other

    @property
    def max_samples(self) -> int:
        """How many samples the method draws at most; 1 for methods that draw none."""
        return int(getattr(self.method, "limit", getattr(self.method, "samples", 1)))

    def refine(self, inputs: Tensor, target: TargetLike) -> Iterator[tuple[Explanation, float]]:
        """Yield the explanation after each chunk of samples, with the seconds until then.

        Methods that draw no samples yield one.
        """
        self._estimate_time(inputs)
        start = time.perf_counter()
        target = target if self.against is None else Contrast(target, self.against)  # type: ignore[arg-type]
        refine = getattr(self.method, "refine", None)
        for explanation in refine(inputs, target) if refine else [self.method.explain(inputs, target)]:
            seconds = synchronized_time(inputs.device) - start
            if not explanation.attribution.isfinite().all():
                raise OutputError(f"the map of {self.name} is not finite; give options nearer to the defaults")
            self.on_progress(min(1.0, explanation.samples / self.max_samples))
            yield explanation, seconds

    @torch.no_grad()
    def _estimate_time(self, inputs: Tensor) -> None:
        """Call `on_slow` with the time of all maps, from that of one forward pass; of fewer passes nobody waits."""
        passes = max(self.max_samples, getattr(self.method, "steps", 1))
        on_slow, self.on_slow = self.on_slow, lambda estimate: None
        if passes * self.maps < _MANY_PASSES:
            return
        start = time.perf_counter()
        self.model(inputs[:1])
        backward = 3 if "backward" in self.method.info.passes else 1  # a backward pass takes about two forward passes
        seconds = (time.perf_counter() - start) * backward * passes * len(inputs) * self.maps
        if seconds >= _SLOW:
            maps = f" for {self.maps} maps" if self.maps > 1 else ""
            duration = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
            on_slow(f"{self.name} takes {passes} passes per map: about {duration}{maps}")
