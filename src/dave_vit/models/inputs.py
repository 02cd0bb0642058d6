"""Models that take more than pixels: one input is explained, the others are constant."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from dave_vit.errors import OptionError
from dave_vit.models.traits import traits_of


def with_inputs(model: nn.Module, explained: str = "pixel_values", /, **constants: Any) -> WithInputs:
    """A model of one input, the explained one; all others keep the values given here.

    Args:
        model: takes its inputs by name; it stays as it is.
        explained: the name of the input to explain.
        constants: the other inputs. Tensors have one row, ``[1, ...]``, which serves all images of a batch and all
            their views; anything else is handed on as it is.

    Example:
        >>> asked = dave_vit.with_inputs(model, input_ids=ids, attention_mask=mask, use_cache=False)
        >>> attribution = dave_vit.DAVE(asked).attribute(pixels, dave_vit.scores.Token(42))
    """
    return WithInputs(model, explained, constants)


class WithInputs(nn.Module):
    """See ``with_inputs``."""

    def __init__(self, model: nn.Module, explained: str, constants: dict[str, Any]) -> None:
        super().__init__()
        _check_names(model, [explained, *constants])
        if explained in constants:
            raise OptionError(f"{explained} is the explained input; leave it out of the constant ones")
        for name, value in constants.items():
            if isinstance(value, Tensor) and value.ndim > 0 and len(value) != 1:
                raise OptionError(
                    f"{name} has {len(value)} rows; give one row, [1, ...], and explain images that need others in "
                    "calls of their own"
                )
        self.model, self.explained, self.constants = model, explained, constants
        self.traits = traits_of(model)
        self.train(model.training)

    def forward(self, inputs: Tensor) -> Any:
        """The model's output, as it is."""
        others = {name: _fitted(value, inputs) for name, value in self.constants.items()}
        return self.model(**{self.explained: inputs}, **others)


def _fitted(value: Any, inputs: Tensor) -> Any:
    """A constant for as many rows as the explained input has, on its device and in its precision."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(inputs.device, inputs.dtype if value.is_floating_point() else None)
    return value.repeat(len(inputs), *[1] * (value.ndim - 1)) if value.ndim > 0 else value


def _check_names(model: nn.Module, names: list[str]) -> None:
    known = inspect.signature(model.forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    for name in names:
        if name not in known:
            raise OptionError(f"{type(model).__name__} has no input {name!r}; it takes {', '.join(known)}")
