"""What the interception cannot see: the input followed by its memory, kernel by kernel, below every other layer.

The interception knows a tensor by its state. A value that leaves through a number, a buffer's memory, a script or a
switched-off function has no state, and would pass for a constant. This watch runs beneath all of that for one pass of a
model, follows the memory that depends on the input, and says where the two accounts differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dave_vit.errors import UnsupportedOperator
from dave_vit.intercept.names import FACTORIES
from dave_vit.intercept.states import is_operator, tensors

_SHAPE_ONLY = frozenset(
    """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty
    new_empty_strided""".split()
)
_DECISIONS = frozenset("__bool__ is_nonzero equal allclose __contains__".split())
_PLACES = frozenset("__getitem__ __setitem__ select narrow".split())
_FILLED = FACTORIES | frozenset("full tensor as_tensor scalar_tensor asarray".split())  # the result has a state

_CONSTANT = (
    "it takes a tensor for a constant that depends on the image: what is made of numbers, of .data or of memory "
)
_CONSTANT += "that is written elsewhere cannot be followed; use the tensor itself"
_NUMBER = "it turns a value that depends on the image into a number; keep it a tensor"
_SHAPE = "the shape of its result depends on the image; use a mask or torch.where in its place"
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


class Watch(TorchDispatchMode):
    """Follows the memory of one input; made and entered inside of the interception.

    Args:
        inputs: what is followed.
        where: says in which module a function is called.
    """

    def __init__(self, inputs: Tensor, where: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where
        self._problem = ""
        self._memory: dict[int, StorageWeakRef] = {}
        self._function = ""
        self._own: set[int] = set()  # memory of the carriers that the function was given
        self._carriers: set[int] = set()
        self._frozen: set[int] = set()
        self._depth = torch._C._len_torch_function_stack()
        self._follow(inputs)

    def check(self) -> None:
        """Refuse the model if the two accounts differed anywhere."""
        if self._problem:
            raise UnsupportedOperator(self._problem)

    def call(self, name: str, arguments: Any) -> None:
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
        name = func.overloadpacket.__name__
        depends = name not in _SHAPE_ONLY and any(self._depends(tensor) for tensor in tensors((args, kwargs)))
        if depends:
            self._examine(func, name, args)
            self._follow(*tensors(result))
        for tensor in _written(func, args, kwargs):
            if _address(tensor) in self._carriers - self._own:
                self._note(self._function, _BELOW)
            elif depends:
                self._follow(tensor)
        return result

    def _examine(self, func: Any, name: str, args: Any) -> None:
        if torch._C._len_torch_function_stack() >= self._depth:
            self._note(name, _HIDDEN)
        elif torch.Tag.data_dependent_output in func.tags and self._function not in _DECISIONS | _PLACES | _FILLED:
            self._note(self._function, _NUMBER)
        elif torch.Tag.dynamic_output_shape in func.tags and (name != "index" or _masked(args[1])):
            self._note(self._function, _SHAPE)

    def _note(self, name: str, why: str) -> None:
        # Not raised at once: a script or a kernel in between would make another error of it.
        self._problem = self._problem or f"{name}{self._where()} cannot be explained exactly: {why}"

    def _depends(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._memory

    def _follow(self, *found: Tensor) -> None:
        for tensor in found:
            address = _address(tensor)
            if address:
                # Weakly: memory may be freed, but its address is not given away again while the pass lasts.
                self._memory[address] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _address(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # wrappers and sparse tensors have no memory of their own
        return 0


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that a kernel writes to."""
    positions, names = _writes(func)
    given = [args[position] for position in positions if position < len(args)]
    return list(tensors([*given, *(kwargs.get(name) for name in names)])) if names else []


@cache
def _writes(func: Any) -> tuple[list[int], list[str]]:
    written = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [position for position, _ in written], [name for _, name in written]


def _masked(indices: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors(indices))
