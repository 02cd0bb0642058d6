"""What the interception cannot see: the memory that depends on the input, tracked kernel by kernel.

The interception knows a tensor by its state. A value that leaves through a number, a buffer's memory, a script or a
switched-off function has no state, and would pass for a constant. The tracker runs beneath all of that for one pass of
a model, follows the memory that depends on the input, and notes where memory and states disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dave_vit.engine.interception import Interception
from dave_vit.engine.operators import OPERATORS, function_name
from dave_vit.engine.states import is_operator, tensors
from dave_vit.errors import UnsupportedOperator

_SHAPE_ONLY = frozenset(
    """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty
    new_empty_strided""".split()
)
# Functions that may make numbers of a tensor: decisions, indices, and those whose result has a state.
_MAKES_NUMBERS = frozenset(
    """__bool__ is_nonzero equal allclose __contains__ __getitem__ __setitem__ select narrow full tensor as_tensor
    scalar_tensor asarray""".split()
) | {name for name, operator in OPERATORS.items() if operator.fills_result}

_CONSTANT = (
    "it takes a tensor for a constant that depends on the image: what is made of numbers, of .data or of memory "
    "that is written elsewhere cannot be followed; use the tensor itself"
)
_NUMBER = "it turns a value that depends on the image into a number; keep it a tensor"
_SHAPE = "the shape of its result depends on the image; use a mask or torch.where instead"
_BELOW = (
    "it writes into the memory of a tensor that carries the image, through .data or .detach(); write into the tensor "
    "itself, or into a copy"
)
_STALE = "it takes a view of a tensor into which a frozen operator was written since; take the view afterwards"
_HIDDEN = (
    "it ran out of the interception's sight, in a torch.jit module, a compiled extension or with torch functions "
    "switched off; run the plain module"
)
_TRANSFORMED = "it is called inside of a torch.func transform (vmap, grad, vjp, jvp); write the function out"


class TrackedInterception(Interception):
    """Interception that also tracks the memory which depends on the input."""

    _tracker: MemoryTracker | None = None

    @contextmanager
    def track(self, inputs: Tensor) -> Iterator[MemoryTracker]:
        """Track the memory of the input; to be entered inside of the interception."""
        self._tracker = MemoryTracker(inputs, self.location)
        with self._tracker:
            yield self._tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Announce one call to the tracker and route it."""
        if self._tracker is not None:
            self._tracker.start_call(function_name(func).name, (args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def freeze(self, target: Tensor) -> None:
        """Make a carrier that is about to be written to an operator."""
        super().freeze(target)
        if self._tracker is not None:
            self._tracker.freeze(target)


class MemoryTracker(TorchDispatchMode):
    """Follows the memory of one input; created and entered inside of the interception.

    Args:
        inputs: what is followed.
        location: returns in which module a function is called.
    """

    def __init__(self, inputs: Tensor, location: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._location = location
        self._problem = ""
        self._memory: dict[int, StorageWeakRef] = {}
        self._function = ""
        self._own: set[int] = set()  # memory of the carriers among the function's arguments
        self._carriers: set[int] = set()
        self._frozen: set[int] = set()
        self._depth = torch._C._len_torch_function_stack()
        self._follow(inputs)

    def check(self) -> None:
        """Refuse the model if memory and states disagreed anywhere."""
        if self._problem:
            raise UnsupportedOperator(self._problem)

    def start_call(self, name: str, arguments: Any) -> None:
        """Note which function is about to run, and compare the states of its arguments with their memory."""
        self._function, self._own = name, set()
        for tensor in tensors(arguments):
            carries = tensor.requires_grad and not tensor.is_leaf
            if carries:
                self._own.add(_address(tensor))
                if _address(tensor) in self._frozen:
                    self._note(name, _STALE)
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                self._note(name, _TRANSFORMED)
            elif self._depends(tensor) and not (is_operator(tensor) or carries):
                self._note(name, _CONSTANT)
        self._carriers |= self._own

    def freeze(self, target: Tensor) -> None:
        """Note that a carrier's memory is about to hold an operator."""
        self._carriers.discard(_address(target))
        self._frozen.add(_address(target))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel, and follow what it makes of the input."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kernel = _describe_kernel(func)
        depends = not kernel.shape_only and any(map(self._depends, tensors((*args, *kwargs.values()))))
        if depends:
            self._examine(kernel, args)
            self._follow(*tensors(result))
        for tensor in kernel.written_tensors(args, kwargs):
            if _address(tensor) in self._carriers - self._own:
                self._note(self._function, _BELOW)
            elif depends:
                self._follow(tensor)
        return result

    def _examine(self, kernel: _Kernel, args: Any) -> None:
        if torch._C._len_torch_function_stack() >= self._depth:
            self._note(kernel.name, _HIDDEN)
        elif kernel.makes_numbers and self._function not in _MAKES_NUMBERS:
            self._note(self._function, _NUMBER)
        elif kernel.makes_shapes and (kernel.name != "index" or _has_mask(args[1])):
            self._note(self._function, _SHAPE)

    def _note(self, name: str, why: str) -> None:
        # Not raised at once: a script or a kernel in between would turn it into another error.
        self._problem = self._problem or f"{name}{self._location()} cannot be explained exactly: {why}"

    def _depends(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._memory

    def _follow(self, *followed: Tensor) -> None:
        for tensor in followed:
            address = _address(tensor)
            if address:
                # Weakly: memory may be freed, but its address is not given away again while the pass lasts.
                self._memory[address] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _address(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # wrappers and sparse tensors have no memory of their own
        return 0


class _Kernel:
    """The properties of a kernel that each of its calls needs.

    Attributes:
        name: without its overload.
        shape_only: its result does not depend on the numbers of its arguments.
        makes_numbers: its result is a Python number.
        makes_shapes: the shape of its result depends on numbers.
    """

    def __init__(self, func: Any) -> None:
        self.name = func.overloadpacket.__name__
        self.shape_only = self.name in _SHAPE_ONLY
        self.makes_numbers = torch.Tag.data_dependent_output in func.tags
        self.makes_shapes = torch.Tag.dynamic_output_shape in func.tags
        aliases = ((place, one.name, one.alias_info) for place, one in enumerate(func._schema.arguments))
        self._writes = [(place, name) for place, name, alias in aliases if alias is not None and alias.is_write]

    def written_tensors(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors that a call writes to."""
        return tensors([args[place] if place < len(args) else kwargs.get(name) for place, name in self._writes])


_describe_kernel = cache(_Kernel)


def _has_mask(indices: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors(indices))
