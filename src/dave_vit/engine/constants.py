"""Check that constants stay the same for another image.

The identity s = <W, x> + constants also holds where a value that depends on the image is treated as a constant. So the
model is run with several images, and the constants that meet a tensor of the image are compared call by call: tensors,
numbers and shapes. This finds what leaves torch altogether: through another thread, raw memory, text, or an attribute
that an earlier call set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit._internal.precision import precise_dtype
from dave_vit.engine.forward import Read, forward, isolate_pass
from dave_vit.engine.interception import Interception
from dave_vit.engine.operators import function_name
from dave_vit.engine.rule_sets.effective import EFFECTIVE
from dave_vit.engine.states import depends_on_input, tensors

_DECISIONS = frozenset("__bool__ is_nonzero equal allclose __contains__".split())
_NEAR = 1e-3  # relative to the image: no branch is likely to change

CallConstants = tuple[str, tuple[Any, ...]]
"""The name of a function, and all its constant arguments."""


class ConstantRecorder(Interception):
    """Interception that records the constant arguments of every function that is called with a tensor of the image.

    Args:
        args, kwargs: as of ``Interception``.
        expected: the record of another image, with which this one is compared.

    Attributes:
        calls: the record.
        changed: the first function, with its module, whose constants are not the expected ones; "" if there is none.
    """

    def __init__(self, *args: Any, expected: Sequence[CallConstants] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[CallConstants] = []
        self.changed = ""
        self._expected = expected
        self._decides = decides(expected)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the constants, then run the call."""
        spelling = function_name(func)
        if not spelling.operator.has_constant_result and any(map(_varies, tensors((args, kwargs or {})))):
            writes = spelling.inplace or spelling.name == "__setitem__"  # into memory that may hold anything before
            named = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            self._record(spelling.name, _facts((args[1:] if writes else args, named)))
        return super().__torch_function__(func, types, args, kwargs)

    def _record(self, name: str, constants: tuple[Any, ...]) -> None:
        expected = self._expected[len(self.calls)] if len(self.calls) < len(self._expected) else (name, constants)
        self.calls.append((name, constants))
        if expected[0] != name and self._decides:
            self._expected = ()  # after another branch, calls have no counterpart
        elif expected != (name, constants):
            self.changed = self.changed or f"{name}{self.location()}"


def decides(calls: Sequence[CallConstants]) -> bool:
    """Return whether a model branches on values of the image."""
    return any(name in _DECISIONS for name, _ in calls)


def record_constants(
    model: nn.Module, read: Read, inputs: Tensor, expected: Sequence[CallConstants] = ()
) -> ConstantRecorder:
    """Run a model and return the record of the constants that met the image."""
    recorder = ConstantRecorder(EFFECTIVE, model, expected=expected)
    with isolate_pass(inputs):
        forward(model, inputs, recorder, None, read)
    return recorder


def another_image(inputs: Tensor, calls: Sequence[CallConstants]) -> Tensor:
    """Return images that should meet the same constants.

    A branch on image values may change constants, as it may change everything, and is not a fault. Where the model has
    such branches, the images are close to the given ones.
    """
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0), dtype=inputs.dtype).to(inputs.device)
    return inputs + _NEAR * inputs.std() * noise if decides(calls) else 0.5 * inputs.flip(-1) + noise


def find_changing_constant(model: nn.Module, inputs: Tensor, read: Read) -> str:
    """Return the function, with its module, that receives another constant for another image; "" if none does."""
    first = record_constants(model, read, inputs).calls
    return record_constants(model, read, another_image(inputs, first), first).changed


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
