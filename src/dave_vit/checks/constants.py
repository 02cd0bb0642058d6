"""Check that constants stay the same for another image.

The identity s = <W, x> + constants also holds where a value that depends on the image is treated as a constant. So the
model is run with several images, and all constant arguments of its functions are compared call by call: tensors,
numbers and shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.forward import Read, forward, isolate_pass
from dave_vit.engine.interception import Interception
from dave_vit.engine.operators import function_name
from dave_vit.engine.rule_sets.effective import EFFECTIVE
from dave_vit.engine.states import depends_on_input

_DECISIONS = frozenset("__bool__ is_nonzero equal allclose __contains__".split())
_NEAR = 1e-3  # relative to the image: no branch is likely to change


def find_changing_constant(model: nn.Module, inputs: Tensor, read: Read) -> str:
    """Return the function, with its module, that receives another constant for another image; "" if none does.

    A branch on image values may change constants, as it may change everything, and is not a fault. Where the model has
    such branches, only images close to the given one are compared.
    """
    first = _constants(model, inputs, read)
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0), dtype=inputs.dtype).to(inputs.device)
    others = [inputs + _NEAR * inputs.std() * noise]
    if not any(name in _DECISIONS for name, _ in first):
        others.append(0.5 * inputs.flip(-1) + noise)
    return next((changed for other in others if (changed := _difference(first, _constants(model, other, read)))), "")


_CallConstants = tuple[str, tuple[Any, ...]]
"""A function with its module, and all its constant arguments."""


def _constants(model: nn.Module, inputs: Tensor, read: Read) -> list[_CallConstants]:
    recorder = _ConstantRecorder(model)
    with isolate_pass(inputs):
        forward(model, inputs, recorder, None, read)
    return recorder.calls


def _difference(first: list[_CallConstants], second: list[_CallConstants]) -> str:
    for (name, before), (other, after) in zip(first, second, strict=False):
        if name != other:
            return ""  # another branch: later calls have no counterpart
        if before != after:
            return name
    return ""


class _ConstantRecorder(Interception):
    """Records the constant arguments of every function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(EFFECTIVE, model)
        self.calls: list[_CallConstants] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the constants, then run the call."""
        spelling = function_name(func)
        if not spelling.operator.has_constant_result:
            writes = spelling.inplace or spelling.name == "__setitem__"  # into memory that may hold anything before
            named = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            constants = _facts((args[1:] if writes else args, named))
            name = spelling.name if spelling.name in _DECISIONS else f"{spelling.name}{self.location()}"
            self.calls.append((name, constants))
        return super().__torch_function__(func, types, args, kwargs)


def _facts(value: Any) -> tuple[Any, ...]:
    """Return the constants in nested arguments in a form that can be compared."""
    if isinstance(value, Tensor):
        varies = depends_on_input(value) and not (value.requires_grad and value.is_leaf)  # a leaf is a parameter
        return () if varies else _digest(value)
    if isinstance(value, list | tuple):
        return tuple(fact for item in value for fact in _facts(item))
    if isinstance(value, dict):
        return _facts(list(value.values()))
    return (repr(value),) if isinstance(value, bool | int | float | complex | str) else ()  # NaN is not itself


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_complex() or not tensor.numel() or tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    numbers = tensor.detach().flatten().double().nan_to_num()
    ramp = torch.arange(1.0, len(numbers) + 1, dtype=torch.float64, device=numbers.device)
    return (tuple(tensor.shape), float(numbers.sum()), float(numbers @ ramp))
