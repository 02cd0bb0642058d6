"""Normalisation: the mean is centred and carries gradient, the scale is frozen (appendix A, layer normalization)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.calls import Call
from dave_vit.engine.fast.kernels import norms as fused
from dave_vit.engine.states import depends_on_input, is_carrier, mark, state_of
from dave_vit.engine.surrogate import carry
from dave_vit.errors import training_error


def layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *args: Any,
) -> Tensor:
    """(x - mean) / sigma * gamma + beta, sigma frozen."""
    if depends_on_input(weight) or depends_on_input(bias):
        norm = partial(F.layer_norm, input, normalized_shape, eps=eps)
        return _in_parts(call, norm, weight, bias, tuple(normalized_shape))
    dims = tuple(range(-len(tuple(normalized_shape)), 0))
    x, *scales = _in_types(call, input.detach(), weight, bias)
    # The kernel behind F.layer_norm, which gives 1 / sigma away as well.
    value, _, inverse = torch.native_layer_norm(x, tuple(normalized_shape), scales[0], scales[1], eps)

    fits = not call.mode.traced and fused.applicable(input, tuple(normalized_shape))  # a compiler makes its own kernel
    pullback = partial(fused.centred, dtype=input.dtype) if fits else partial(centred, dims=dims)

    carried = carry(lambda: value, pullback, input, saved=(inverse, weight))
    return carried if bias is None else call.mode.record_constant(carried, lambda: bias, call.name)


def _in_types(call: Call, x: Tensor, *parts: Tensor | None) -> list[Any]:
    """Input, weight and bias in the types in which a layer norm runs."""
    if x.dtype is call.mode.stream:  # the kernel computes in float32 anyway
        wanted = x.dtype if x.is_cuda else None  # on a CPU weights in float32 have it give 1 / sigma in it
    else:
        wanted = working_dtype(x.dtype) if torch.is_autocast_enabled(x.device.type) else None
    return [part if part is None or wanted is None else part.to(wanted) for part in (x, *parts)]


def centred(grad: Tensor, inverse: Tensor, weight: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    """What goes back through a layer norm with sigma frozen: (g - mean g) / sigma, with g = grad * gamma."""
    scaled = grad.to(inverse.dtype, copy=weight is None)
    scaled = scaled if weight is None else scaled * weight
    return scaled.sub_(scaled.mean(dims, keepdim=True)).mul_(inverse)


def rms_norm(
    call: Call, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """x / rms * gamma, rms frozen."""
    if depends_on_input(weight):
        norm = partial(F.rms_norm, input, normalized_shape, eps=eps)
        return _in_parts(call, norm, weight, None, tuple(normalized_shape))
    x = input.detach().to(working_dtype(input.dtype))
    dims = tuple(range(-len(tuple(normalized_shape)), 0))
    floor = torch.finfo(input.dtype).eps if eps is None else eps
    inverse = (x.square().mean(dims, keepdim=True) + floor).rsqrt()
    carried = carry(
        lambda: call.func(input, normalized_shape, weight, eps),
        lambda grad, inverse, weight: (grad if weight is None else grad * weight) * inverse,
        input,
        saved=(inverse, weight),
    )
    return mark(carried, state_of(input))


def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *args: Any,
) -> Tensor:
    """Layer norm over groups of channels."""
    per_channel = (1, -1, *[1] * (input.ndim - 2))
    if depends_on_input(weight) or depends_on_input(bias):
        return _in_parts(call, partial(F.group_norm, input, num_groups, eps=eps), weight, bias, per_channel)
    x = input.detach().to(working_dtype(input.dtype))
    groups = (x.shape[0], num_groups, -1)
    inverse = (x.reshape(groups).var(-1, unbiased=False, keepdim=True) + eps).rsqrt()

    def pullback(grad: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
        scaled = (grad if weight is None else grad * weight.view(per_channel)).reshape(groups)
        return ((scaled - scaled.mean(-1, keepdim=True)) * inverse).reshape(grad.shape)

    compute = partial(call.func, input, num_groups, weight, bias, eps, *args)
    value = carry(compute, pullback, input, saved=(inverse, weight))
    return value if bias is None else call.mode.record_constant(value, lambda: bias.view(per_channel), call.name)


def instance_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,  # noqa: FBT001
    momentum: float = 0.1,
    eps: float = 1e-5,
    *args: Any,
) -> Tensor:
    """Group norm with one channel a group."""
    if running_mean is not None:
        raise training_error("instance normalisation with running statistics" + call.mode.location())
    plain = Call(call.mode, torch.nn.functional.group_norm, "group_norm")
    return group_norm(plain, input, input.shape[1], weight, bias, eps)


def normalize(call: Call, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    """x / norm, norm frozen."""
    if not is_carrier(input):
        raise call.mode.refusal(call.name)
    scale = input.detach().norm(p, dim, keepdim=True).clamp_min(eps)
    return mark(carry(lambda: call.func(input, p, dim, eps), torch.div, input, saved=(scale,)), state_of(input))


def batch_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """An affine map with constant statistics in evaluation mode.

    Its derivative is written out since torch's own (2.15, CPU) is wrong where gradient and input differ in layout.
    """
    if training or running_mean is None or running_var is None:
        raise training_error("batch normalisation" + call.mode.location())
    mean, variance, shape = running_mean, running_var, (1, -1, *[1] * (input.ndim - 2))
    if any(map(depends_on_input, (mean, variance, weight, bias))):
        norm = lambda: (input - mean.view(shape)) * (variance.view(shape) + eps).rsqrt()  # noqa: E731
        return _in_parts(call, norm, weight, bias, shape)
    scale = (variance + eps).rsqrt() if weight is None else weight * (variance + eps).rsqrt()
    scale = scale.view(shape)
    compute = partial(call.func, input, running_mean, running_var, weight, bias, training, momentum, eps)
    value = carry(compute, torch.mul, input, saved=(scale,))
    zeros = torch.zeros_like(input[:1])
    constant = partial(call.func, zeros, running_mean, running_var, weight, bias, training, momentum, eps)
    return call.mode.record_constant(value, constant, call.name)


def _in_parts(
    call: Call, norm: Callable[[], Tensor], weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...] = (-1,)
) -> Tensor:
    """A norm whose own parameters depend on the input: norm, scale and shift each meet their rule."""
    with call.mode:
        value = norm()
        value = value if weight is None else value * weight.view(shape)
        return value if bias is None else value + bias.view(shape)
