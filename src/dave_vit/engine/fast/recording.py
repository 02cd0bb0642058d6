"""A model's forward pass as a list of torch calls, recorded once without computing anything.

A tape stands in for the model where the pass is traced for compiling: its calls can be rewritten first, and when it is
played they meet the interception like the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from dave_vit.engine.autograd_graph import check_graph, enable_autograd
from dave_vit.engine.calls import function_name
from dave_vit.engine.interception import ModulePaths, Placed
from dave_vit.engine.states import map_tensors, tensors


class Unrecordable(Exception):
    """The model does something that a tape cannot hold; it is then run as it is."""


class Ref(NamedTuple):
    """A tensor made by a call of the tape; call -1 is the input."""

    call: int
    output: int = 0


@dataclass(frozen=True)
class Recorded(Placed):
    """One call: a function, and arguments in which tensors of the tape are references."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...] = ()  # of its outputs
    module: str = ""  # the path of the module that made it

    @property
    def name(self) -> str:
        """The function's canonical name."""
        return function_name(self.func).name

    def __call__(self, made: Callable[[Ref], Tensor]) -> Any:
        """Make the call again, with the tensors that the references stand for."""
        args = [made(value) if type(value) is Ref else map_refs(made, value) for value in self.args]
        return self.func(*args, **(map_refs(made, self.kwargs) if self.kwargs else self.kwargs))


@dataclass(frozen=True)
class Tape:
    """Calls in order, and which of their results is the model's output."""

    calls: tuple[Recorded, ...]
    output: Ref
    input_shape: tuple[int, ...]
    classes: int

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """The shape of a tensor of the tape."""
        return self.input_shape if ref.call < 0 else self.calls[ref.call].shapes[ref.output]

    def play(self, inputs: Tensor) -> Tensor:
        """The output for other inputs of the recorded shape."""
        made: dict[Ref, Tensor] = {Ref(-1): inputs}
        for index, (call, done) in enumerate(zip(self.calls, self._done, strict=True)):
            result = call(made.__getitem__)
            if isinstance(result, Tensor):
                made[Ref(index)] = result
            else:
                made.update({Ref(index, output): tensor for output, tensor in enumerate(tensors(result))})
            for ref in done:
                made.pop(ref, None)
        return made[self.output]

    @cached_property
    def _done(self) -> list[list[Ref]]:
        """What nobody needs after each call."""
        last = {ref: index for index, call in enumerate(self.calls) for ref in refs((call.args, call.kwargs))}
        done: list[list[Ref]] = [[] for _ in self.calls]
        for ref, index in last.items():
            if ref != self.output:
                done[index].append(ref)
        return done


def refs(value: Any) -> list[Ref]:
    """All references in nested lists, tuples and dicts."""
    found: list[Ref] = []
    map_refs(lambda ref: found.append(ref), value)
    return found


def map_refs(function: Callable[[Ref], Any], value: Any) -> Any:
    """The same nesting with every reference replaced."""
    kind = type(value)
    if kind is Ref:
        return function(value)
    if kind is tuple or kind is list or kind is torch.Size:
        return kind([map_refs(function, item) for item in value])
    if kind is dict:
        return {key: map_refs(function, item) for key, item in value.items()}
    return value


def record(forward: Callable[[Tensor], Any], inputs: Tensor) -> Tape:
    """The calls that ``forward`` makes for inputs of this shape, type and device.

    Nothing is computed: the tensors are torch's fake ones, which know their shapes only.

    Raises:
        Unrecordable: the pass writes in place, looks at values, or leaves torch's functions.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, enable_autograd():
        given = fake.from_tensor(inputs).detach().requires_grad_()
        recorder = _Recorder(given, ModulePaths(forward if isinstance(forward, nn.Module) else None))
        try:
            with recorder:
                output = forward(given)
                output = getattr(output, "logits", output)
            if isinstance(output, Tensor):
                check_graph(output)
        except (Unrecordable, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model does not do on fake tensors: it is then run as it is
            raise Unrecordable(str(error)) from error
        if not isinstance(output, FakeTensor) or output.ndim != 2:
            raise Unrecordable("it returns no logits")
        return Tape(tuple(recorder.calls), recorder.ref(output), tuple(inputs.shape), output.shape[1])


@dataclass
class _Known:
    ref: Ref
    tensor: Tensor = field(repr=False)  # kept, so that its id is not given to another


class _Recorder(TorchFunctionMode):
    def __init__(self, inputs: Tensor, paths: ModulePaths) -> None:
        super().__init__()
        self._paths = paths
        self.calls: list[Recorded] = []
        self._known = {id(inputs): _Known(Ref(-1), inputs)}

    def ref(self, tensor: Tensor) -> Any:
        """The reference of a tensor of the tape; constants stand for themselves."""
        known = self._known.get(id(tensor))
        if known is not None:
            return known.ref
        if isinstance(tensor, FakeTensor):
            raise Unrecordable("a tensor was made outside of torch's functions")
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call on fake tensors and write it down."""
        kwargs, spelling = kwargs or {}, function_name(func)
        if spelling.inplace or spelling.name == "__setitem__" or kwargs.get("inplace"):
            raise Unrecordable(f"{spelling.name} in place")
        if spelling.name in ("register_hook", "retain_grad"):
            raise Unrecordable("somebody watches its gradients")
        if spelling.name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        result = func(*args, **kwargs)
        made = list(tensors(result))
        if made:
            args, kwargs = map_tensors(self.ref, args), map_tensors(self.ref, kwargs)
            self.calls.append(Recorded(func, args, kwargs, _shapes(made), self._paths.here()))
            for output, tensor in enumerate(made):
                if isinstance(tensor, FakeTensor):  # others are views of constants
                    self._known[id(tensor)] = _Known(Ref(len(self.calls) - 1, output), tensor)
        return result


def _shapes(made: list[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in made)
