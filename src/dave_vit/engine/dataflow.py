"""What the interception cannot see: the memory that depends on the input, tracked kernel by kernel.

The interception knows a tensor by its state. A value that leaves through a number, a buffer's memory, a script or a
switched-off function has no state, and would pass for a constant. The tracker runs beneath all of that for one pass of
a model, follows the memory that depends on the input, and notes where memory and states disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dave_vit._internal.torch_private import TorchDispatchMode, is_transformed, memory_id
from dave_vit.engine.constants import ConstantRecorder
from dave_vit.engine.operators import OPERATORS, function_name
from dave_vit.engine.random_draws import RANDOM_FUNCTIONS
from dave_vit.engine.states import is_operator, tensors
from dave_vit.errors import UnsupportedOperator

_SHAPE_ONLY = frozenset(
    """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty
    new_empty_strided""".split()
)
_ATTENTION = re.compile("attention|sdp")
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
_RANDOM = (
    "it uses random numbers, so that every pass explains another model; switch them off, or draw them from a generator "
    "that is seeded in each call"
)
_ORDERS = ("randperm", "multinomial")  # of tokens, which may not matter
_TRANSFORMED = "it is called inside of a torch.func transform (vmap, grad, vjp, jvp); write the function out"


class TrackedInterception(ConstantRecorder):
    """Interception that also tracks the memory which depends on the input, and records constants."""

    _tracker: MemoryTracker | None = None

    @property
    def random_use(self) -> str:
        """Where an order drawn at random met the input first, as a refusal; "" if none did."""
        return "" if self._tracker is None else self._tracker.random_use

    @contextmanager
    def track(self, inputs: Tensor) -> Iterator[MemoryTracker]:
        """Track the memory of the input; to be entered inside of the interception."""
        self._tracker = MemoryTracker(inputs, self.location)
        with self._tracker:
            yield self._tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Announce one call to the tracker and route it."""
        if self._tracker is None:
            return super().__torch_function__(func, types, args, kwargs)
        with self._tracker.follow_call(function_name(func).name, (args, kwargs or {})):
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
        self.random_use = ""
        self._draws_orders_only = True
        self._memory: dict[int, StorageWeakRef] = {}
        self._random: dict[int, StorageWeakRef] = {}
        self._function = ""
        self._is_random = False  # whether the function draws numbers, and from no generator of the model's own
        self._own: set[int] = set()  # memory of the carriers among the function's arguments
        self._carriers: set[int] = set()
        self._frozen: set[int] = set()
        self._calls = 0  # that the interception is routing
        _add_memory(self._memory, inputs)

    def check(self) -> None:
        """Refuse the model if memory and states disagreed anywhere."""
        if self._problem:
            raise UnsupportedOperator(self._problem)

    @contextmanager
    def follow_call(self, name: str, arguments: Any) -> Iterator[None]:
        """Compare the states of a function's arguments with their memory, and know its kernels for routed ones."""
        self._start_call(name, arguments)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def _start_call(self, name: str, arguments: Any) -> None:
        self._function, self._own = name, set()
        self._is_random = name in RANDOM_FUNCTIONS and arguments[1].get("generator") is None
        for tensor in tensors(arguments):
            carries = tensor.requires_grad and not tensor.is_leaf
            if carries:
                self._own.add(memory_id(tensor))
                if memory_id(tensor) in self._frozen:
                    self._note(name, _STALE)
            if self._depends(tensor) and not (is_operator(tensor) or carries):
                self._note(name, _TRANSFORMED if is_transformed(tensor) else _CONSTANT)
        self._carriers |= self._own

    def freeze(self, target: Tensor) -> None:
        """Note that a carrier's memory is about to hold an operator."""
        self._carriers.discard(memory_id(target))
        self._frozen.add(memory_id(target))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel, and follow what it makes of the input."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kernel, values = _describe_kernel(func), tensors((*args, *kwargs.values()))
        written = kernel.written_tensors(args, kwargs)
        depends = not kernel.shape_only and any(map(self._depends, values))
        is_random = kernel.draws and (self._is_random or kwargs.get("generator") is None)
        if is_random or any(memory_id(value) in self._random for value in values):
            self._follow_random(kernel, [*tensors(result), *written], depends=depends)
        if depends:
            self._examine(kernel, args)
            _add_memory(self._memory, *tensors(result))
        for tensor in written:
            if memory_id(tensor) in self._carriers - self._own:
                self._note(self._function, _BELOW)
            elif depends:
                _add_memory(self._memory, tensor)
        return result

    def _follow_random(self, kernel: _Kernel, results: list[Tensor], *, depends: bool) -> None:
        """Follow numbers that were drawn at random; what is drawn and not used does no harm, nor may an order."""
        self._draws_orders_only &= kernel.name in _ORDERS or not kernel.draws
        if not (depends or kernel.makes_numbers):
            _add_memory(self._random, *results if kernel.draws or not kernel.shape_only else ())
        elif self._draws_orders_only:
            self.random_use = self.random_use or self._describe(self._function, _RANDOM)
        else:
            self._note(self._function or kernel.name, _RANDOM)

    def _examine(self, kernel: _Kernel, args: Any) -> None:
        if self._calls == 0:
            self._note(kernel.name, _HIDDEN)
        elif kernel.makes_numbers and self._function not in _MAKES_NUMBERS:
            self._note(self._function, _NUMBER)
        elif kernel.makes_shapes and any(map(self._depends, tensors(kernel.shaping_arguments(args)))):
            self._note(self._function, _SHAPE)

    def _note(self, name: str, why: str) -> None:
        # Not raised at once: a script or a kernel in between would turn it into another error.
        self._problem = self._problem or self._describe(name, why)

    def _describe(self, name: str, why: str) -> str:
        return f"{name}{self._location()} cannot be explained exactly: {why}"

    def _depends(self, tensor: Tensor) -> bool:
        return memory_id(tensor) in self._memory


def _add_memory(memory: dict[int, StorageWeakRef], *followed: Tensor) -> None:
    for tensor in followed:
        address = memory_id(tensor)
        if address:
            # Weakly: memory may be freed, but its address is not given away again while the pass lasts.
            memory[address] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _Kernel:
    """The properties of a kernel that each of its calls needs.

    Attributes:
        name: without its overload.
        shape_only: its result does not depend on the numbers of its arguments.
        makes_numbers: its result is a Python number.
        makes_shapes: the shape of its result depends on numbers.
        draws: it draws random numbers; attention does so for its dropout only, which has a refusal of its own, and so
            does the kernel by which CUDA chooses among forms of attention (``_fused_sdp_choice``).
    """

    def __init__(self, func: Any) -> None:
        self.name = func.overloadpacket.__name__
        self.shape_only = self.name in _SHAPE_ONLY
        self.makes_numbers = torch.Tag.data_dependent_output in func.tags
        self.makes_shapes = torch.Tag.dynamic_output_shape in func.tags
        self.draws = torch.Tag.nondeterministic_seeded in func.tags and not _ATTENTION.search(self.name)
        aliases = ((place, one.name, one.alias_info) for place, one in enumerate(func._schema.arguments))
        self._writes = [(place, name) for place, name, alias in aliases if alias is not None and alias.is_write]

    def written_tensors(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors that a call writes to."""
        return tensors([args[place] if place < len(args) else kwargs.get(name) for place, name in self._writes])

    def shaping_arguments(self, args: Any) -> Any:
        """Return the arguments whose numbers decide on the shape of the result; of indices only masks do."""
        if self.name not in ("index", "masked_select"):
            return args
        return [tensor for tensor in tensors(args[1:]) if tensor.dtype in (torch.bool, torch.uint8)]


_describe_kernel = cache(_Kernel)
