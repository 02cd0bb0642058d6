"""Whether what is taken for a constant stays the same for another image.

The identity s = <W, x> + constants holds as well where something that depends on the image passes for a constant. So
the model is run with several images, and all that met its functions without a state is compared, call by call: tensors,
numbers and shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import function_name
from dave_vit.engine.forward import Read, forward, isolate_pass
from dave_vit.engine.function_names import CONSTANT_RESULT
from dave_vit.engine.interception import Interception
from dave_vit.engine.rule_sets.effective import EFFECTIVE
from dave_vit.engine.states import depends_on_input

_DECISIONS = frozenset("__bool__ is_nonzero equal allclose __contains__".split())
_NEAR = 1e-3  # of the image: no decision is likely to be taken the other way


def find_changing_constant(model: nn.Module, inputs: Tensor, read: Read) -> str:
    """The function that met a constant which is another one for another image, with its module; nothing if none did.

    A decision that depends on the image may change constants, as it may change everything: it is held. Where the model
    takes any, only images next to the given one are tried.
    """
    first = _constants(model, inputs, read)
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0), dtype=inputs.dtype).to(inputs.device)
    tried = [inputs + _NEAR * inputs.std() * noise]
    if not any(name in _DECISIONS for name, _ in first):
        tried.append(0.5 * inputs.flip(-1) + noise)
    return next((found for other in tried if (found := _difference(first, _constants(model, other, read)))), "")


_Met = tuple[str, tuple[Any, ...]]
"""Where a function was called, and all constants that it was given."""


def _constants(model: nn.Module, inputs: Tensor, read: Read) -> list[_Met]:
    ledger = _Ledger(model)
    with isolate_pass(inputs):
        forward(model, inputs, ledger, None, read)
    return ledger.met


def _difference(first: list[_Met], second: list[_Met]) -> str:
    for (name, before), (other, after) in zip(first, second, strict=False):
        if name != other:
            return ""  # another way through the model: no call has its counterpart from here on
        if before != after:
            return name
    return ""


class _Ledger(Interception):
    """Writes down every constant that met a function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(EFFECTIVE, model)
        self.met: list[_Met] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is given, and go on."""
        spelling = function_name(func)
        if spelling.name not in CONSTANT_RESULT:
            writes = spelling.inplace or spelling.name == "__setitem__"  # into memory that may hold anything before
            named = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            given = _facts((args[1:] if writes else args, named))
            name = spelling.name if spelling.name in _DECISIONS else f"{spelling.name}{self.location()}"
            self.met.append((name, given))
        return super().__torch_function__(func, types, args, kwargs)


def _facts(value: Any) -> tuple[Any, ...]:
    """All that is constant in nested arguments, in a form that can be compared."""
    if isinstance(value, Tensor):
        held = depends_on_input(value) and not (value.requires_grad and value.is_leaf)  # a leaf is a parameter
        return () if held else _digest(value)
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
