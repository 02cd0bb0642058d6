"""A model's forward pass as a list of torch calls, recorded while the model itself runs.

A recording replaces the model where its calls are rewritten first; when it is run they meet the interception like the
model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ref as weak_ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dave_vit.engine.calls import ModuleCall, ModulePaths, place_tensors
from dave_vit.engine.fingerprint import forget_fingerprints
from dave_vit.engine.operators import FunctionName, function_name
from dave_vit.engine.states import cast_constant, map_tensors, tensors

Region = tuple[tuple[int, int, int], ...]
"""A slice of a tensor: (dimension, start, length) for each dimension that is not whole, in order."""

WHOLE: Region = ()
_CASTS_ONCE: ContextVar[bool] = ContextVar("casts", default=False)


@contextmanager
def cast_weights_once() -> Iterator[None]:
    """Context in which a recorded pass casts weights once and keeps them all, instead of wherever a rule reads them.

    For small passes, which are as long as their number of kernels.
    """
    token = _CASTS_ONCE.set(True)
    try:
        yield
    finally:
        _CASTS_ONCE.reset(token)


_LAYERS = ("linear", "conv1d", "conv2d", "conv3d")


class TensorRef(NamedTuple):
    """A tensor that a recorded call returned, or a slice of it; call -1 is the input."""

    call: int
    output: int = 0
    region: Region = WHOLE


class Modes(NamedTuple):
    """The modes of torch on which the result of a call depends."""

    grad: bool
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device: str) -> Modes:
        """Return the modes in force on a type of device."""
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return cls(torch.is_grad_enabled(), enabled, dtype)

    @contextmanager
    def enter(self, device: str) -> Iterator[None]:
        """Put these modes in force."""
        with torch.set_grad_enabled(self.grad), torch.autocast(device, dtype=self.dtype, enabled=self.autocast):
            yield


@dataclass(frozen=True)
class RecordedCall(ModuleCall):
    """One call: a function, and arguments in which tensors of the recording are references."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...] = ()  # of its outputs
    module: str = ""  # the path of the module that made it
    modes: Modes | None = None  # where they are not those of the whole pass

    @property
    def name(self) -> str:
        """The function's canonical name."""
        return function_name(self.func).name

    def __call__(self, resolve: Callable[[TensorRef], Tensor], device: str, weight: Tensor | None = None) -> Any:
        """Make the call again, with the tensors that the references stand for, and with another form of its weight."""
        args = [resolve(value) if type(value) is TensorRef else map_refs(resolve, value) for value in self.args]
        args[1:2] = args[1:2] if weight is None else [weight]
        kwargs = map_refs(resolve, self.kwargs) if self.kwargs else self.kwargs
        with nullcontext() if self.modes is None else self.modes.enter(device):
            return self.func(*args, **kwargs)


@dataclass(frozen=True)
class Recording:
    """Calls in order, and which of their results is the model's output."""

    calls: tuple[RecordedCall, ...]
    output: TensorRef
    input_shape: tuple[int, ...]
    classes: int

    def shape(self, ref: TensorRef) -> tuple[int, ...]:
        """Return the shape of a whole tensor of the recording."""
        return self.input_shape if ref.call < 0 else self.calls[ref.call].shapes[ref.output]

    def __call__(self, inputs: Tensor) -> Tensor:
        """Compute the output for other inputs of the recorded shape."""
        results: dict[TensorRef, Tensor] = {TensorRef(-1): inputs}
        device = inputs.device.type
        weights = self._cast_weights(device)
        for index, (call, unused) in enumerate(zip(self.calls, self._unused_after, strict=True)):
            result = call(results.__getitem__, device, weights.get(index))
            if isinstance(result, Tensor):
                results[TensorRef(index)] = result
            else:
                results.update({TensorRef(index, output): tensor for output, tensor in enumerate(tensors(result))})
            for ref in unused:
                results.pop(ref, None)
        return results[self.output]

    def _cast_weights(self, device: str) -> dict[int, Tensor]:
        """Return the weights of layers in autocast's type, by call, if they are cast once."""
        if not (_CASTS_ONCE.get() and torch.is_autocast_enabled(device)):
            return {}
        dtype = torch.get_autocast_dtype(device)
        return {index: cast_constant(weight, dtype) for index, weight in self._weights.items()}

    @cached_property
    def _weights(self) -> dict[int, Tensor]:
        """The float32 weights of layers that run in the modes of the whole pass, by call."""
        layers = ((i, call.args[1]) for i, call in enumerate(self.calls) if call.name in _LAYERS and call.modes is None)
        kinds = (Tensor, nn.Parameter)
        return {i: weight for i, weight in layers if type(weight) in kinds and weight.dtype is torch.float32}

    def repeats(self, other: Recording) -> bool:
        """Return whether another recording has the same calls with the same constants."""
        return self.output == other.output and self._facts == other._facts

    @cached_property
    def _facts(self) -> list[Any]:
        """What can be compared of each call; constants are the same if they are the same objects."""
        return [(call.func, map_tensors(id, (call.args, call.kwargs)), call.modes) for call in self.calls]

    @cached_property
    def _unused_after(self) -> list[list[TensorRef]]:
        """The tensors that are not needed any more after each call."""
        last = {ref: index for index, call in enumerate(self.calls) for ref in find_refs((call.args, call.kwargs))}
        unused: list[list[TensorRef]] = [[] for _ in self.calls]
        for ref, index in last.items():
            if ref != self.output:
                unused[index].append(ref)
        return unused


def find_refs(value: Any) -> list[TensorRef]:
    """Return all references in nested lists, tuples and dicts."""
    collected: list[TensorRef] = []
    map_refs(collected.append, value)
    return collected


def map_refs(function: Callable[[TensorRef], Any], value: Any) -> Any:
    """Apply a function to every reference in nested lists, tuples and dicts."""
    kind = type(value)
    if kind is TensorRef:
        return function(value)
    if kind is tuple or kind is list or kind is torch.Size:
        return kind([map_refs(function, item) for item in value])
    if kind is dict:
        return {key: map_refs(function, item) for key, item in value.items()}
    return value


class Recorder(TorchFunctionMode):
    """A model that records the calls of its next pass, which is otherwise its own.

    Args:
        model: maps inputs to logits.
    """

    def __init__(self, model: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._model = model
        self._paths = ModulePaths(model if isinstance(model, nn.Module) else None)
        self._calls: list[RecordedCall] = []
        # By id, with what tells whether a tensor was changed where no function is called.
        self._known: dict[int, tuple[weak_ref[Tensor], TensorRef, tuple[int, bool]]] = {}
        self.problem = ""  # why there is no recording
        self.recording: Recording | None = None

    def __call__(self, inputs: Tensor) -> Any:
        """Run the model and record its calls."""
        forget_fingerprints()
        self._device, self._default_dtype = inputs.device.type, torch.get_default_dtype()
        self._modes = Modes.current(self._device)
        self._remember(inputs, TensorRef(-1))
        with self:
            output = self._model(inputs)
        logits = getattr(output, "logits", output)
        ref = self._find_ref(logits) if isinstance(logits, Tensor) and logits.ndim == 2 else None
        if not isinstance(ref, TensorRef):
            self.problem = self.problem or "it returns no logits"
        elif not self.problem:
            self.recording = Recording(tuple(self._calls), ref, tuple(inputs.shape), logits.shape[1])
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call and record it."""
        spelling, (args, kwargs) = function_name(func), place_tensors(func, args, kwargs or {})
        if self.problem:
            return func(*args, **kwargs)
        if spelling.name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        arg_refs, kwarg_refs = map_tensors(self._find_ref, (args, kwargs))
        result = func(*args, **kwargs)
        outputs, given = tensors(result), tensors((args, kwargs))
        self.problem = self.problem or self._find_problem(spelling, kwargs, given, outputs)
        if not all(any(output is one for one in given) for output in outputs):
            self._record(func, arg_refs, kwarg_refs, outputs)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        modes = Modes.current(self._device)
        shapes = tuple(tuple(tensor.shape) for tensor in outputs)
        other = None if modes == self._modes else modes
        self._calls.append(RecordedCall(func, args, kwargs, shapes, self._paths.innermost(), other))
        for output, tensor in enumerate(outputs):
            self._remember(tensor, TensorRef(len(self._calls) - 1, output))

    def _find_problem(self, spelling: FunctionName, kwargs: Any, given: list[Tensor], outputs: list[Tensor]) -> str:
        """Return what of a call cannot be recorded, or ""."""
        name, operator = spelling.name, spelling.operator
        if spelling.inplace or name in ("__setitem__", "retain_grad") or kwargs.get("inplace") or "out" in kwargs:
            return f"{name} in place"
        if kwargs.get("generator") is not None:
            return f"{name} with a generator"  # which the model may seed anew in each pass
        if torch.get_default_dtype() is not self._default_dtype:
            return f"{name} with another default type"
        if operator.changes_gradients or operator.takes_gradients:
            return f"{name} reads gradients"
        if torch.is_inference_mode_enabled():
            return f"{name} in inference mode"
        if given and not outputs and not operator.has_constant_result:
            return f"{name} reads values"  # which the next pass may not have
        return ""

    def _remember(self, tensor: Tensor, ref: TensorRef) -> None:
        self._known[id(tensor)] = (weak_ref(tensor), ref, (tensor._version, tensor.requires_grad))

    def _find_ref(self, tensor: Tensor) -> Any:
        """Return the reference of a tensor of the recording; constants are kept as they are."""
        alive, ref, version = self._known.get(id(tensor), (None, None, None))
        if alive is None or alive() is not tensor:
            return tensor
        if version != (tensor._version, tensor.requires_grad):
            self.problem = self.problem or "a tensor was changed outside of torch's functions"
        return ref
