"""Layer norms by the kernel behind ``F.layer_norm``, which returns 1 / sigma too, and residual streams in bfloat16.

Autocast would widen every sum of a residual stream to float32. The range of bfloat16 is that of float32, so that
residual streams fit into it.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.calls import Call, Rule, carry
from dave_vit.engine.fast import kernels, register_substitute
from dave_vit.engine.rules import norms
from dave_vit.engine.states import depends_on_input, map_tensors, mark, state_of, tensors

_MAX_WIDTH = 16384  # numbers up to which a row stays in registers


@register_substitute(norms.layer_norm)
def layer_norm(plain: Rule, call: Call, input: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a layer norm with sigma frozen."""
    weight, bias, eps = norms.norm_parameters(*args, **kwargs)
    if depends_on_input(weight) or depends_on_input(bias):
        return NotImplemented
    shape = tuple(normalized_shape)
    x, *parameters = _cast(input.detach(), weight, bias)
    with torch.autocast(x.device.type, enabled=False):  # which would cast bfloat16 to float32, and then back
        value, _, inverse = torch.native_layer_norm(x, shape, parameters[0], parameters[1], eps)
    if kernel_takes(input, shape):
        pullback = partial(center_gradient, dtype=input.dtype)
    else:
        pullback = partial(norms.center_gradient, dims=tuple(range(-len(shape), 0)))
    carried = carry(lambda: value, pullback, input, saved=(inverse, weight))
    return call.mode.record_constant(carried, lambda: bias, call.name)


def _cast(x: Tensor, *parameters: Tensor | None) -> list[Any]:
    """Cast input, weight and bias to the types in which a layer norm runs."""
    if x.dtype is torch.bfloat16 and is_bfloat16_autocast(x):  # the kernel computes in float32 anyway
        dtype = x.dtype if x.is_cuda else None  # on a CPU it returns 1 / sigma in float32 if the weights are in it
    else:
        dtype = working_dtype(x.dtype) if torch.is_autocast_enabled(x.device.type) else None
    return [part if part is None or dtype is None else part.to(dtype) for part in (x, *parameters)]


def kernel_takes(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether the kernel takes a norm of this input over dimensions of this shape."""
    return math.prod(shape) <= _MAX_WIDTH and kernels.take(x)


def center_gradient(grad: Tensor, inverse: Tensor, weight: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """Compute (g - mean g) / sigma with g = grad * gamma in one kernel.

    Args:
        grad: gradient of what the norm returned.
        inverse: 1 / sigma, one for each row.
        weight: gamma, in the shape of a row.
        dtype: type of the result.
    """
    rows = grad.reshape(inverse.numel(), -1).contiguous()
    flat = None if weight is None else weight.reshape(-1).contiguous()
    pulled: Tensor = kernels.load().center_gradient(rows, inverse.reshape(-1), flat, dtype)
    return pulled.view(grad.shape)


def is_bfloat16_autocast(tensor: Tensor) -> bool:
    """Return whether autocast works in bfloat16 on the device of a tensor."""
    device = tensor.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16


def _narrow(tensor: Tensor) -> Tensor:
    return mark(tensor.to(torch.bfloat16), state_of(tensor)) if tensor.dtype is torch.float32 else tensor


# Residual streams pass through these, and they return the widest type of their arguments.
@register_substitute("add", "sub", "cat", "mul")
def keep_bfloat16(plain: Rule, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Run a sum or product in bfloat16 where one argument is in it already."""
    terms = tensors((args, kwargs))
    if not (any(term.dtype is torch.bfloat16 for term in terms) and is_bfloat16_autocast(terms[0])):
        return NotImplemented
    args, kwargs = map_tensors(_narrow, (args, kwargs))
    return plain(call, *args, **kwargs)
