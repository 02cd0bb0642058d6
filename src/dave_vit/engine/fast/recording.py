"""A model's forward pass as a list of torch calls, recorded once without computing anything.

A recording replaces the model where its calls are rewritten first; when it is run they meet the interception like the
model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from dave_vit.engine.autograd_graph import check_graph, enable_autograd
from dave_vit.engine.interception import ModuleCall, ModulePaths
from dave_vit.engine.operators import function_name
from dave_vit.engine.states import map_tensors, tensors


class RecordingError(Exception):
    """The model does something that cannot be recorded; it is then run as it is."""


class TensorRef(NamedTuple):
    """A tensor that a recorded call returned; call -1 is the input."""

    call: int
    output: int = 0


@dataclass(frozen=True)
class RecordedCall(ModuleCall):
    """One call: a function, and arguments in which tensors of the recording are references."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...] = ()  # of its outputs
    module: str = ""  # the path of the module that made it

    @property
    def name(self) -> str:
        """The function's canonical name."""
        return function_name(self.func).name

    def __call__(self, resolve: Callable[[TensorRef], Tensor]) -> Any:
        """Make the call again, with the tensors that the references stand for."""
        args = [resolve(value) if type(value) is TensorRef else map_refs(resolve, value) for value in self.args]
        return self.func(*args, **(map_refs(resolve, self.kwargs) if self.kwargs else self.kwargs))


@dataclass(frozen=True)
class Recording:
    """Calls in order, and which of their results is the model's output."""

    calls: tuple[RecordedCall, ...]
    output: TensorRef
    input_shape: tuple[int, ...]
    classes: int

    def shape(self, ref: TensorRef) -> tuple[int, ...]:
        """Return the shape of a tensor of the recording."""
        return self.input_shape if ref.call < 0 else self.calls[ref.call].shapes[ref.output]

    def run(self, inputs: Tensor) -> Tensor:
        """Compute the output for other inputs of the recorded shape."""
        results: dict[TensorRef, Tensor] = {TensorRef(-1): inputs}
        for index, (call, unused) in enumerate(zip(self.calls, self._unused_after, strict=True)):
            result = call(results.__getitem__)
            if isinstance(result, Tensor):
                results[TensorRef(index)] = result
            else:
                results.update({TensorRef(index, output): tensor for output, tensor in enumerate(tensors(result))})
            for ref in unused:
                results.pop(ref, None)
        return results[self.output]

    @cached_property
    def _unused_after(self) -> list[list[TensorRef]]:
        """The tensors that are not needed any more after each call."""
        last = {ref: index for index, call in enumerate(self.calls) for ref in find_refs((call.args, call.kwargs))}
        unused: list[list[TensorRef]] = [[] for _ in self.calls]
        for ref, index in last.items():
            if ref != self.output:
                unused[index].append(ref)
        return unused


def find_refs(value: Any, ref_type: type = TensorRef) -> list[Any]:
    """Return all references of a type in nested lists, tuples and dicts."""
    collected: list[Any] = []
    map_refs(collected.append, value, ref_type)
    return collected


def map_refs(function: Callable[[Any], Any], value: Any, ref_type: type = TensorRef) -> Any:
    """Apply a function to every reference of a type in nested lists, tuples and dicts."""
    kind = type(value)
    if kind is ref_type:
        return function(value)
    if kind is tuple or kind is list or kind is torch.Size:
        return kind([map_refs(function, item, ref_type) for item in value])
    if kind is dict:
        return {key: map_refs(function, item, ref_type) for key, item in value.items()}
    return value


def record_calls(forward: Callable[[Tensor], Any], inputs: Tensor) -> Recording:
    """Record the calls that ``forward`` makes for inputs of this shape, type and device.

    Nothing is computed: the tensors are torch's fake ones, which have shapes only.

    Raises:
        RecordingError: the pass writes in place, reads values, or leaves torch's functions.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, enable_autograd():
        fake_inputs = fake.from_tensor(inputs).detach().requires_grad_()
        recorder = _Recorder(fake_inputs, ModulePaths(forward if isinstance(forward, nn.Module) else None))
        try:
            with recorder:
                output = forward(fake_inputs)
                output = getattr(output, "logits", output)
            if isinstance(output, Tensor):
                check_graph(output)
        except (RecordingError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model does not do on fake tensors: it is then run as it is
            raise RecordingError(str(error)) from error
        if not isinstance(output, FakeTensor) or output.ndim != 2:
            raise RecordingError("it returns no logits")
        return Recording(tuple(recorder.calls), recorder.ref(output), tuple(inputs.shape), output.shape[1])


class _Recorder(TorchFunctionMode):
    def __init__(self, inputs: Tensor, paths: ModulePaths) -> None:
        super().__init__()
        self._paths = paths
        self.calls: list[RecordedCall] = []
        self._known = {id(inputs): (TensorRef(-1), inputs)}  # the tensor is kept, so that its id is not reused

    def ref(self, tensor: Tensor) -> Any:
        """Return the reference of a tensor of the recording; constants are kept as they are."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][0]
        if isinstance(tensor, FakeTensor):
            raise RecordingError("a tensor was made outside of torch's functions")
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call on fake tensors and record it."""
        kwargs, spelling = kwargs or {}, function_name(func)
        if spelling.inplace or spelling.name == "__setitem__" or kwargs.get("inplace"):
            raise RecordingError(f"{spelling.name} in place")
        if spelling.name in ("register_hook", "retain_grad"):
            raise RecordingError("a hook reads its gradients")
        if spelling.name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        result = func(*args, **kwargs)
        outputs = tensors(result)
        if outputs:
            args, kwargs = map_tensors(self.ref, args), map_tensors(self.ref, kwargs)
            shapes = tuple(tuple(tensor.shape) for tensor in outputs)
            self.calls.append(RecordedCall(func, args, kwargs, shapes, self._paths.innermost()))
            for output, tensor in enumerate(outputs):
                if isinstance(tensor, FakeTensor):  # others are views of constants
                    self._known[id(tensor)] = (TensorRef(len(self.calls) - 1, output), tensor)
        return result
