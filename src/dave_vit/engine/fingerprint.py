"""Fingerprints of models: one walk through all that a forward pass may read shows whether a model changed since.

Recordings, compiled graphs and verdicts on a model are valid as long as its fingerprint is the same. Parameters and
other tensors count by identity and by where they lie, not by their numbers: whoever keeps a fingerprint reads numbers
anew in every pass.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from threading import Thread, local
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any
from weakref import ProxyTypes, WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit._internal.torch_private import BatchNorm, Dropout, global_hooks
from dave_vit.engine.autograd_graph import checkpointing_error
from dave_vit.errors import offload_error, quantization_error, training_error

_PLAIN = (int, float, bool, complex, str, bytes, range, type(None), type(...))
_VALUES = frozenset((*_PLAIN, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format))
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset)
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ENTRY_POINTS = ("forward", "__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__", "__len__")
# Bookkeeping of torch, which no forward pass reads.
_SKIPPED = frozenset(
    """_non_persistent_buffers_set _is_full_backward_hook _forward_hooks_with_kwargs _forward_hooks_always_called
    _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks
    _load_state_dict_post_hooks""".split()
)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType)
_BUILT_IN = (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
# Threads count what they do, as that of progress bars does every ten seconds.
_BY_IDENTITY = (*_DESCRIPTORS, *_BUILT_IN, types.ClassMethodDescriptorType, types.ModuleType, enum.Enum, Thread)
# Attributes that stand for an object of some other kind.
_PARTS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    **dict.fromkeys([staticmethod, classmethod, functools._lru_cache_wrapper], ("__wrapped__",)),
    property: ("fget",),
}
# What is looked into in a file, whoever made it.
_IN_FILES = (Tensor, nn.Module, FunctionType, SimpleNamespace, ContextVar, local, np.ndarray, *_CONTAINERS, *_PARTS)
_LIBRARIES = sys.stdlib_module_names - {"os"} | {"torch", "numpy", "builtins"}  # os has the environment
_FILE_READERS = frozenset(("open", "read_text", "read_bytes"))  # nobody can tell whether what they read has changed
_TRAINERS = frozenset(("lightning", "pytorch_lightning"))  # modules hold their trainer, which holds its data
_MAX_TOKENS = 300_000  # a model with more, such as one that holds its training data, is not recorded


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


def _walk_modules(model: nn.Module) -> Fingerprint:
    for module in model.modules():
        _check(model, module)
    walk = _Walk()
    walk.add(model)
    walk.add_methods()
    for hooks in global_hooks():
        walk.add_hooks(hooks)
    is_recordable = not (walk.has_hooks or (walk.opaque | _FILE_READERS) & walk.names)
    structure = hash(tuple(walk.tokens))
    latest = _LATEST[model] = Fingerprint(hash((structure, *walk.counts)), structure, is_recordable, walk.tensors)
    return latest


class _Walk:
    """Collects tokens, which are equal for equal states, of everything that can be reached from an object."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.counts: list[Any] = []  # whole numbers and tensors among the attributes of modules
        self.has_hooks = False
        self.tensors: set[int] = set()
        self._attribute = "forward"  # of a module, whose value is added
        self.opaque: set[str] = set()  # attributes of modules with values that cannot be looked into
        self._seen: dict[int, int] = {}
        self._classes: dict[type, None] = {}
        self.names = set(_ENTRY_POINTS)  # that are read somewhere, be it of a module or of a file
        self._read: set[tuple[int, frozenset[str]]] = set()  # files and the names that were read of them
        self._alive: list[Any] = []  # so that the ids of what is made on the way are not given away again

    def add(self, value: Any) -> None:
        """Add what a value is."""
        kind = type(value)
        if kind in _VALUES:
            self.tokens += (kind, value)
        elif len(self.tokens) > _MAX_TOKENS:
            self.opaque.add("forward")
        elif isinstance(value, Tensor):
            self.tokens += self._describe_tensor(value)
        elif id(value) in self._seen:
            self.tokens.append(self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            outer = self._attribute
            self._add_object(kind, value)
            self._attribute = outer

    def _add_object(self, kind: type, value: Any) -> None:
        if kind in ProxyTypes:  # they look like what they point to
            self._add_opaque(kind)
        elif isinstance(value, nn.Module):
            self._add_module(value)
        elif isinstance(value, _CONTAINERS):
            self._add_container(kind, value)
        elif kind is FunctionType:
            self._add_function(value)
        elif isinstance(value, type):
            self.tokens.append(_serial_number(value))
            bases = (*value.__mro__, *kind.__mro__)
            self._classes.update(dict.fromkeys(base for base in bases if base not in (nn.Module, object, type)))
        elif isinstance(value, _BY_IDENTITY):
            self.tokens.append(id(value))
        elif isinstance(value, ContextVar):
            self.add(value.get(None))
        else:
            self._add_parts(kind, value)

    def _add_opaque(self, kind: type) -> None:
        self.opaque.add(self._attribute)
        self.tokens.append(kind)

    def _describe_tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        self.tensors.add(id(tensor))
        is_placed = tensor.layout is torch.strided and tensor.device.type != "meta"
        place = (tensor.data_ptr(), tensor.stride()) if is_placed else ()
        return (_serial_number(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, *place)

    def _add_module(self, module: nn.Module) -> None:
        self.tokens.append(_serial_number(module))
        self.add(type(module))
        for name, value in vars(module).items():
            kind = type(value)
            if kind is int:
                self.counts.append(value)
            elif isinstance(value, Tensor) and kind is not nn.Parameter:  # as models keep of their last call
                self.tokens += (name, value.dtype)
                self.counts += self._describe_tensor(value)
            elif kind in _VALUES:  # as most are
                self.tokens += (name, kind, value)
            elif name in _HOOKS:
                self.add_hooks(value)
            elif name not in _SKIPPED and (kind is not dict or value):  # most tables are empty
                self._attribute = name
                self.tokens.append(name)
                is_table = kind is dict and name in _TABLES  # those of scripted modules are no dicts
                for part in (*value, *value.values()) if is_table else (value,):
                    self.add(part)

    def add_hooks(self, hooks: dict[int, Any]) -> None:
        """Add hooks, not what they hold: many collect something in every pass, and none is recorded."""
        self.has_hooks |= bool(hooks)
        self.tokens += map(_serial_number, hooks.values())

    def _add_container(self, kind: type, values: Any) -> None:
        """Add what a container holds itself; subclasses may import or compute more, as transformers' mappings do."""
        base = next(one for one in _CONTAINERS if isinstance(values, one))
        self.tokens += (kind, base.__len__(values))
        for value in (*base.__iter__(values), *(dict.values(values) if base is dict else ())):
            self.add(value)

    def add_methods(self) -> None:
        """Add what the classes of modules define, as far as forward passes may read it, by whatever way."""
        added: set[tuple[type, str]] = set()
        while found := [member for member in self._read_members() if member not in added]:
            for base, name in found:
                self.tokens.append(name)
                self.add(vars(base)[name])
            added.update(found)

    def _read_members(self) -> Iterator[tuple[type, str]]:
        return ((base, name) for base in self._classes for name in vars(base) if name in self.names)

    def _add_function(self, function: FunctionType) -> None:
        """Add a function with what it reads of its surroundings."""
        self.tokens += (_serial_number(function), _serial_number(function.__code__))
        if _is_library(function.__module__):
            return
        for part in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            if part:
                self.add(part)
        for cell in function.__closure__ or ():
            self.add(None if cell == CellType() else cell.cell_contents)  # it may be empty
        names = _names_in(function.__code__)
        self.names |= names
        self._add_globals(function.__globals__, names)

    def _add_globals(self, namespace: dict[str, Any], names: frozenset[str]) -> None:
        """Add what some names stand for in a file, and in the files that it imports."""
        if (id(namespace), names) in self._read:
            return
        self._read.add((id(namespace), names))
        looked_into = FunctionType if _is_library(namespace.get("__name__")) else _IN_FILES
        for name in names & namespace.keys():
            value, self._attribute = namespace[name], name
            home = (value if isinstance(value, type) else type(value)).__module__
            if isinstance(value, types.ModuleType):
                self._add_globals(vars(value), names)
            elif type(value) in _VALUES or isinstance(value, looked_into) or not _is_library(home):
                self.add(value)
            else:
                self.tokens.append(id(value))

    def _add_parts(self, kind: type, value: Any) -> None:
        """Add an object of any other kind by its attributes."""
        names = next((names for known, names in _PARTS.items() if isinstance(value, known)), None)
        if names is None and (kind.__module__.partition(".")[0] in _TRAINERS or not hasattr(value, "__dict__")):
            self._add_opaque(kind)
            return
        self.tokens.append(kind)
        for part in (kind, vars(value)) if names is None else [getattr(value, name) for name in names]:
            self.add(part)


_SERIAL_NUMBERS: dict[int, tuple[ref[Any], int]] = {}
_NEXT = count()


def _serial_number(value: Any) -> int:
    """Return a number that no other object ever gets; an id is given away again when its object is gone."""
    known = _SERIAL_NUMBERS.get(id(value))
    if known is None or known[0]() is not value:
        key = id(value)
        known = _SERIAL_NUMBERS[key] = (ref(value, lambda _: _SERIAL_NUMBERS.pop(key, None)), next(_NEXT))
    return known[1]


def _is_library(home: str | None) -> bool:
    """Return whether a file is one that nobody writes into."""
    return home is not None and home.partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names, or texts, by which a function and those inside of it may read globals and attributes."""
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    texts = (const for const in code.co_consts if isinstance(const, str))
    return frozenset((*code.co_names, *texts)).union(*inner)


def is_packed(module: nn.Module) -> bool:
    """Return whether a layer has weights that bitsandbytes packed."""
    return type(module).__module__.startswith("bitsandbytes.")


def _check(model: nn.Module, module: nn.Module) -> None:
    """Raise for a module that acts at random, learns while it runs, or recomputes its forward pass."""
    declared = "grad_checkpointing" in vars(module) or hasattr(type(module), "grad_checkpointing")
    if declared and getattr(module, "grad_checkpointing", False) is True:  # modules are slow to say that they have none
        raise checkpointing_error()
    if getattr(getattr(module, "_hf_hook", None), "offload", False):  # of accelerate
        raise offload_error()
    if is_packed(module):
        raise quantization_error()
    if not module.training:
        return
    if getattr(module, "gradient_checkpointing", False) is True:
        raise checkpointing_error()
    rate = getattr(module, "p", 0.0) if isinstance(module, Dropout) else 0.0
    rate = max(rate or 0.0, getattr(module, "drop_prob", 0.0) or 0.0)
    if rate > 0.0 or isinstance(module, BatchNorm):
        name = next(name for name, other in model.named_modules() if other is module)
        raise training_error(f"{type(module).__name__} {name!r}")
