"""Normalisation: the mean is centred and carries gradient, the scale is frozen (appendix A, layer normalization)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.calls import Call, carry
from dave_vit.engine.states import depends_on_input, is_carrier, mark, state_of
from dave_vit.errors import training_error

Parameters = tuple[Tensor | None, Tensor | None, float]


def norm_parameters(weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any) -> Parameters:
    """Return gamma, beta and epsilon from the arguments of a norm after its shape."""
    return weight, bias, eps


def layer_norm(call: Call, input: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Tensor:
    """(x - mean) / sigma * gamma + beta, sigma frozen."""
    shape, (weight, bias, eps) = tuple(normalized_shape), norm_parameters(*args, **kwargs)
    if depends_on_input(weight) or depends_on_input(bias):
        return _norm_in_parts(call, partial(F.layer_norm, input, shape, eps=eps), weight, bias, shape)
    dims = tuple(range(-len(shape), 0))
    inverse = (_widen(input).var(dims, unbiased=False, keepdim=True) + eps).rsqrt()
    compute = partial(call.func, input.detach(), shape, *args, **kwargs)
    carried = carry(compute, partial(center_gradient, dims=dims), input, saved=(inverse, weight))
    return call.mode.record_constant(carried, lambda: bias, call.name)


def center_gradient(grad: Tensor, inverse: Tensor, weight: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    """Compute (g - mean g) / sigma with g = grad * gamma, the derivative of a layer norm with sigma frozen."""
    scaled = grad.to(inverse.dtype)
    scaled = scaled if weight is None else scaled * weight
    return (scaled - scaled.mean(dims, keepdim=True)) * inverse


def rms_norm(
    call: Call, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """x / rms * gamma, rms frozen."""
    shape = tuple(normalized_shape)
    if depends_on_input(weight):
        return _norm_in_parts(call, partial(F.rms_norm, input, shape, eps=eps), weight, None, shape)
    floor = torch.finfo(working_dtype(input.dtype)).eps if eps is None else eps
    squares = _widen(input).square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    compute = partial(call.func, input.detach(), shape, weight, eps)
    return mark(carry(compute, _scale_gradient, input, saved=((squares + floor).rsqrt(), weight)), state_of(input))


def _scale_gradient(grad: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
    return (grad if weight is None else grad * weight.conj()) * inverse.conj()


def group_norm(call: Call, input: Tensor, num_groups: int, *args: Any, **kwargs: Any) -> Tensor:
    """Layer norm over groups of channels."""
    per_channel, (weight, bias, eps) = (1, -1, *[1] * (input.ndim - 2)), norm_parameters(*args, **kwargs)
    if depends_on_input(weight) or depends_on_input(bias):
        return _norm_in_parts(call, partial(F.group_norm, input, num_groups, eps=eps), weight, bias, per_channel)
    groups = (len(input), num_groups, -1)
    inverse = (_widen(input).reshape(groups).var(-1, unbiased=False, keepdim=True) + eps).rsqrt()

    def pullback(grad: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
        scaled = grad if weight is None else grad * weight.view(per_channel)
        return center_gradient(scaled.reshape(groups), inverse, None, (-1,)).reshape(grad.shape)

    compute = partial(call.func, input.detach(), num_groups, *args, **kwargs)
    value = carry(compute, pullback, input, saved=(inverse, weight))
    return call.mode.record_constant(value, lambda: None if bias is None else bias.view(per_channel), call.name)


INSTANCE_NORM = ("running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
"""The arguments of an instance norm after its input."""


def instance_norm(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Group norm with one channel a group."""
    given = dict(zip(INSTANCE_NORM, args, strict=False)) | kwargs
    if given.get("running_mean") is not None:
        raise training_error("instance normalisation with running statistics" + call.mode.location())
    parameters = {name: given[name] for name in ("weight", "bias", "eps") if name in given}
    return group_norm(Call(call.mode, F.group_norm, "group_norm"), input, input.shape[1], **parameters)


def _widen(input: Tensor) -> Tensor:
    """Return the input without gradient, in the type in which statistics are computed."""
    return input.detach().to(working_dtype(input.dtype))


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
        return _norm_in_parts(call, norm, weight, bias, shape)
    scale = (variance + eps).rsqrt() if weight is None else weight * (variance + eps).rsqrt()
    scale = scale.view(shape)
    parameters = (running_mean, running_var, weight, bias, training, momentum, eps)
    value = carry(lambda: call.func(input, *parameters), torch.mul, input, saved=(scale,))
    return call.mode.record_constant(value, lambda: call.func(torch.zeros_like(input[:1]), *parameters), call.name)


def _norm_in_parts(
    call: Call, norm: Callable[[], Tensor], weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    """Compute a norm whose own parameters depend on the input: norm, scale and shift each meet their rule."""
    with call.mode:
        value = norm()
        value = value if weight is None else value * weight.view(shape)
        return value if bias is None else value + bias.view(shape)
