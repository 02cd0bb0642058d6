"""The walk through all that a forward pass of a model may read, for its fingerprint."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Iterator
from contextvars import ContextVar
from itertools import count
from threading import Thread, local
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any
from weakref import ProxyTypes, ref

import numpy as np
import torch
from torch import Tensor, nn

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


class StateWalk:
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

    @property
    def is_recordable(self) -> bool:
        """Whether all that is read is known, and no hook runs."""
        return not (self.has_hooks or (self.opaque | _FILE_READERS) & self.names)

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
        skipped = _SKIPPED | _find_unread(module)
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
            elif name not in skipped and (kind is not dict or value):  # most tables are empty
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
        base: Any = kind if kind in _CONTAINERS else next(one for one in _CONTAINERS if isinstance(values, one))
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
        if value is sys.stdout or value is sys.stderr:  # those of a notebook lead to its kernel, which always changes
            names = ()
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


def _find_unread(module: nn.Module) -> frozenset[str]:
    """Return the attributes that the forward pass of an adapter of this package does not read."""
    unread: frozenset[str] = getattr(type(module), "UNREAD", frozenset())
    forward = vars(module).get("forward", type(module).forward) if unread else None
    is_own = str(getattr(forward, "__module__", "")).startswith("dave_vit.")  # another one may read anything
    return unread if is_own else frozenset()


@functools.cache
def _is_library(home: str | None) -> bool:
    """Return whether a file is one that nobody writes into."""
    return home is not None and home.partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names, or texts, by which a function and those inside of it may read globals and attributes."""
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    texts = (const for const in code.co_consts if isinstance(const, str))
    return frozenset((*code.co_names, *texts)).union(*inner)
