"""What the interception cannot see: memory that depends on the input, and constants that change with the image.

The interception knows a tensor by its state. A value that leaves through a number, a buffer's memory, a script or a
switched-off function has no state, and would pass for a constant. The tracker runs beneath all of that for one pass of
a model, follows the memory that depends on the input, and notes where memory and states disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dave_vit._internal.precision import precise_dtype
from dave_vit._internal.torch_private import DispatchMode, is_transformed, memory_id
from dave_vit.engine.calls import RANDOM_FUNCTIONS
from dave_vit.engine.forward import Read, forward, isolate_pass
from dave_vit.engine.interception import Interception
from dave_vit.engine.operators import OPERATORS, UNKNOWN, function_name
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.engine.states import depends_on_input, is_operator, tensors

_ATTENTION = re.compile("attention|sdp")
_DECISIONS = frozenset("__bool__ is_nonzero equal allclose __contains__".split())
# Functions that may make numbers of a tensor: decisions, indices, and those whose result has a state.
_MAKES_NUMBERS = _DECISIONS.union(
    "__getitem__ __setitem__ select narrow full tensor as_tensor scalar_tensor asarray".split(),
    (name for name, operator in OPERATORS.items() if operator.fills_result),
)

_CONSTANT = (
    "it treats a tensor that depends on the image as a constant: what is made of numbers, of .data or of memory "
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
    "it ran outside the interception, in a torch.jit module, a compiled extension or with torch functions "
    "switched off; run the plain module"
)
_RANDOM = (
    "it uses random numbers, so that every pass explains another model; switch them off, or draw them from a generator "
    "that is seeded in each call"
)
_ORDERS = ("randperm", "multinomial")  # of tokens, which may not matter
_TRANSFORMED = "it is called inside of a torch.func transform (vmap, grad, vjp, jvp); write the function out"

_NEAR = 1e-3  # relative to the image: no branch is likely to change

CallConstants = tuple[str, tuple[Any, ...]]
"""The name of a function, and all its constant arguments."""


class TrackedInterception(Interception):
    """Interception that records the constants which meet the image, and can track the memory that depends on it.

    The identity s = <W, x> + constants also holds where a value that depends on the image is treated as a constant. So
    the constant arguments of every function that is called with a tensor of the image, tensors, numbers and shapes, are
    compared with those of another image. This finds what leaves torch altogether: through another thread, raw memory,
    text, or an attribute that an earlier call set.

    Args:
        args, kwargs: as of ``Interception``.
        expected: the record of another image, with which this one is compared.

    Attributes:
        calls: the record.
        changed: the first function, with its module, whose constants are not the expected ones; "" if there is none.
        tracker: what tracks memory; to be entered inside of the interception.
    """

    def __init__(self, *args: Any, expected: Sequence[CallConstants] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[CallConstants] = []
        self.changed = ""
        self._expected = expected
        self._decides = decides(expected)
        self.tracker: MemoryTracker | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Announce one call to the tracker, record its constants and route it."""
        spelling, named = function_name(func), kwargs or {}
        with nullcontext() if self.tracker is None else self.tracker.follow_call(spelling.name, (args, named)):
            if not spelling.operator.has_constant_result and any(map(_varies, tensors((args, named)))):
                writes = spelling.inplace or spelling.name == "__setitem__"  # into memory that may hold anything before
                named = {key: value for key, value in named.items() if key != "out"}
                self._record(spelling.name, _facts((args[1:] if writes else args, named)))
            return super().__torch_function__(func, types, args, kwargs)

    def _record(self, name: str, constants: tuple[Any, ...]) -> None:
        expected = self._expected[len(self.calls)] if len(self.calls) < len(self._expected) else (name, constants)
        self.calls.append((name, constants))
        if expected[0] != name and self._decides:
            self._expected = ()  # after another branch, calls have no counterpart
        elif expected != (name, constants):
            self.changed = self.changed or f"{name}{self.location()}"

    def freeze(self, target: Tensor) -> None:
        """Make a carrier that is about to be written to an operator."""
        super().freeze(target)
        if self.tracker is not None:
            self.tracker.freeze(target)


class MemoryTracker(DispatchMode):
    """Follows the memory of one input; created and entered inside of the interception.

    Args:
        inputs: what is followed.
        location: returns in which module a function is called.

    Attributes:
        problem: where memory and states disagreed first, for a refusal; "" if they never did.
        random_use: the first function that draws the order of something at random; "" if there is none.
    """

    def __init__(self, inputs: Tensor, location: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._location = location
        self.problem = ""
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

    @contextmanager
    def follow_call(self, name: str, arguments: Any) -> Iterator[None]:
        """Compare the states of a function's arguments with their memory, and know its kernels for routed ones."""
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
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

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
        self.problem = self.problem or self._describe(name, why)

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
        self.shape_only = OPERATORS.get(self.name, UNKNOWN).has_constant_result
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


def decides(calls: Sequence[CallConstants]) -> bool:
    """Return whether a model branches on values of the image."""
    return any(name in _DECISIONS for name, _ in calls)


def another_image(inputs: Tensor, calls: Sequence[CallConstants]) -> Tensor:
    """Return images that should meet the same constants.

    A branch on image values may change constants, as it may change everything, and is not a fault. Where the model has
    such branches, the images are close to the given ones.
    """
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0), dtype=inputs.dtype).to(inputs.device)
    return inputs + _NEAR * inputs.std() * noise if decides(calls) else 0.5 * inputs.flip(-1) + noise


def find_changing_constant(model: nn.Module, inputs: Tensor, read: Read) -> str:
    """Return the function, with its module, that receives another constant for another image; "" if none does."""

    def record(images: Tensor, expected: Sequence[CallConstants] = ()) -> TrackedInterception:
        mode = TrackedInterception(EFFECTIVE, model, expected=expected)
        with isolate_pass(images):
            forward(model, images, mode, None, read)
        return mode

    first = record(inputs).calls
    return record(another_image(inputs, first), first).changed


def _varies(tensor: Tensor) -> bool:
    return depends_on_input(tensor) and not (tensor.requires_grad and tensor.is_leaf)  # a leaf is a parameter


def _facts(value: Any) -> tuple[Any, ...]:
    """Return the constants in nested arguments in a form that can be compared."""
    if isinstance(value, nn.Parameter):
        return (id(value),)
    if isinstance(value, Tensor):
        return () if _varies(value) else _digest(value)
    if isinstance(value, list | tuple):
        return tuple(fact for item in value for fact in _facts(item))
    if isinstance(value, dict):
        return _facts(list(value.values()))
    return (repr(value),) if isinstance(value, bool | int | float | complex | str) else ()  # NaN is not itself


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.numel() or tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    numbers = tensor.detach().flatten().to(precise_dtype(tensor.device)).nan_to_num()
    ramp = torch.arange(1.0, len(numbers) + 1, dtype=numbers.dtype, device=numbers.device)
    return (tuple(tensor.shape), *torch.stack([numbers.sum(), numbers @ ramp]).tolist())
