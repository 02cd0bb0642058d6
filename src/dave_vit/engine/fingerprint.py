"""Fingerprints of models: one walk through all that a forward pass may read shows whether a model changed since.

Recordings, compiled graphs and verdicts on a model are valid as long as its fingerprint is the same. Parameters and
other tensors count by identity and by where they lie, not by their numbers: whoever keeps a fingerprint reads numbers
anew in every pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from dave_vit._internal.torch_private import BatchNorm, Dropout, global_hooks
from dave_vit.engine.autograd_graph import checkpointing_error
from dave_vit.engine.state_walk import StateWalk
from dave_vit.errors import offload_error, quantization_error, training_error


@dataclass(frozen=True)
class Fingerprint:
    """State of a model.

    Attributes:
        state: changes with all that a forward pass may read, but for the numbers in tensors.
        structure: the state without whole numbers, with which models count their passes, and without tensors other than
            parameters and buffers, which models keep of their last call.
        is_recordable: whether a recording can replace the model: all of its state is known, and nobody hooks into its
            modules, which a recording does not call.
        tensors: the ids of all tensors in it.
    """

    state: int
    structure: int
    is_recordable: bool
    tensors: set[int] = field(compare=False, default_factory=set)

    def known_as(self, before: Fingerprint) -> int:
        """Return under which number a verdict on the model is kept, if it was another one before the passes for it.

        A model that changes so in its passes is kept under its structure: it would be another one after every pass.
        """
        return self.structure if self.state != before.state and self.structure == before.structure else self.state

    def is_known_as(self, number: int | None) -> bool:
        """Return whether a verdict under this number holds for the model."""
        return number in (self.state, self.structure)


@dataclass
class _Cache:
    """Fingerprints of models, and those among them that were taken from an earlier call and are not checked yet."""

    known: dict[nn.Module, Fingerprint] = field(default_factory=dict)
    assumed: dict[nn.Module, Fingerprint] = field(default_factory=dict)


_CACHE: ContextVar[_Cache | None] = ContextVar("fingerprints", default=None)
_LATEST: WeakKeyDictionary[nn.Module, Fingerprint] = WeakKeyDictionary()


class ModelChanged(Exception):
    """A model is not what it was assumed to be."""


@contextmanager
def cache_fingerprints(assumed: nn.Module | None = None) -> Iterator[None]:
    """Cache fingerprints inside of the context, until a model runs code of its own.

    Args:
        assumed: a model that is taken to be what it was, until ``confirm_fingerprints`` checks it.
    """
    latest = {} if assumed is None or assumed not in _LATEST else {assumed: _LATEST[assumed]}
    token = _CACHE.set(_Cache(dict(latest), latest))
    try:
        yield
    finally:
        _CACHE.reset(token)


def confirm_fingerprints() -> None:
    """Check the models that were assumed to be what they were; called while a GPU computes.

    Raises:
        ModelChanged: one of them is another one now.
    """
    cache = _CACHE.get()
    while cache is not None and cache.assumed:
        model, before = cache.assumed.popitem()
        if _walk_modules(model) != before:
            raise ModelChanged


def forget_fingerprints() -> None:
    """Clear the cache; called before a model's own code runs, which may change anything."""
    if (cache := _CACHE.get()) is not None:
        cache.known.clear()


def fingerprint_model(model: nn.Module) -> Fingerprint:
    """Compute the fingerprint of a model, or return the cached one.

    Raises:
        TrainingModeError: it acts at random, or learns while it runs.
        CheckpointingError: it recomputes its forward pass.
    """
    cache = _CACHE.get() or _Cache()
    if model not in cache.known:
        cache.known[model] = _walk_modules(model)
    return cache.known[model]


def check_modes(model: nn.Module) -> None:
    """Raise for a model that ``fingerprint_model`` refuses, without the walk through all that it reads."""
    if model not in (_CACHE.get() or _Cache()).known:
        _check_modules(model)


def _walk_modules(model: nn.Module) -> Fingerprint:
    _check_modules(model)
    walk = StateWalk()
    walk.add(model)
    walk.add_methods()
    for hooks in global_hooks():
        walk.add_hooks(hooks)
    structure = hash(tuple(walk.tokens))
    latest = _LATEST[model] = Fingerprint(hash((structure, *walk.counts)), structure, walk.is_recordable, walk.tensors)
    return latest


def is_packed(module: nn.Module) -> bool:
    """Return whether a layer has weights that bitsandbytes packed."""
    return type(module).__module__.startswith("bitsandbytes.")


def _check_modules(model: nn.Module) -> None:
    """Raise for a model with a module that acts at random, learns while it runs, or recomputes its forward pass."""
    for name, module in model.named_modules():
        declared = "grad_checkpointing" in vars(module) or hasattr(type(module), "grad_checkpointing")
        if declared and getattr(module, "grad_checkpointing", False) is True:  # modules are slow to say they have none
            raise checkpointing_error()
        if getattr(vars(module).get("_hf_hook"), "offload", False):  # of accelerate
            raise offload_error()
        if is_packed(module):
            raise quantization_error()
        if not module.training:
            continue
        if getattr(module, "gradient_checkpointing", False) is True:
            raise checkpointing_error()
        rate = getattr(module, "p", 0.0) if isinstance(module, Dropout) else 0.0
        rate = max(rate or 0.0, getattr(module, "drop_prob", 0.0) or 0.0)
        if rate > 0.0 or isinstance(module, BatchNorm):
            raise training_error(f"{type(module).__name__} {name!r}")
