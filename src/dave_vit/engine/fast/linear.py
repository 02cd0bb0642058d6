"""Linear layers and convolutions: windows that lie side by side as products, and the flat gamma rule by its factors.

Products are much faster than convolutions, such as patch embeddings. The flat gamma rule needs no second product: the
rank-one mean u v of absolute weights is used by its factors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.calls import Call, Rule, carry
from dave_vit.engine.fast import PassKind, kernels, register_substitute
from dave_vit.engine.fast.gates import same_signs
from dave_vit.engine.fast.narrowing import whole_weight
from dave_vit.engine.rules.gamma import Gamma, Layer, adjoint, bias_part, by_output, rank_one_factors, sees_all_inputs
from dave_vit.engine.rules.products import weighted_sum
from dave_vit.engine.states import depends_on_input, is_carrier, source_of

_MAX_ROW = 768  # numbers of a row; with more at once, or in a loop, a compiler's kernel takes up to twice the time


def are_windows_adjacent(
    input: Tensor, weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Return whether the windows of a convolution of images lie side by side."""
    adjacent = tuple(weight.shape[2:]) == _pair(stride) and _pair(padding) == (0, 0) and groups == 1
    return adjacent and _pair(dilation) == (1, 1) and input.ndim == 4


def _pair(size: Any) -> Any:
    return (size, size) if isinstance(size, int) else tuple(size)  # a padding may be a word, which is no pair


def prefers_product(input: Tensor) -> bool:
    """Return whether the product of windows is faster in the forward pass as well; else only in the backward pass."""
    return input.is_cuda


@register_substitute(weighted_sum, Gamma)
def patch_convolution(
    plain: Rule, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Run the rule on a convolution as a product."""
    is_flat = isinstance(plain, Gamma) and plain.flat  # which has a faster form of its own
    if call.name != "conv2d" or is_flat or not are_windows_adjacent(input, weight, *args, **kwargs):
        return NotImplemented
    if not is_carrier(input) or depends_on_input(weight) or depends_on_input(bias):
        return NotImplemented
    return plain(Call(call.mode, _product_of_windows, call.name), input, weight, bias)


def _product_of_windows(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    def pullback(grad: Tensor, matrix: Tensor) -> Tensor:
        return grad @ matrix.conj().to(grad.dtype)

    windows, matrix = windows_of(input, weight), weight.flatten(1)
    outputs = carry(lambda: values_of_windows(input, weight, bias), pullback, windows, saved=(matrix,))
    return arrange_in_grid(outputs, input, weight)


def values_of_windows(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a convolution whose windows lie side by side, without gradient: ``[B, rows * columns, O]``."""
    x = input.detach()
    if prefers_product(input):
        return F.linear(windows_of(x, weight), weight.flatten(1), bias)
    return F.conv2d(x, weight, bias, weight.shape[2:]).flatten(2).transpose(1, 2)


def windows_of(input: Tensor, weight: Tensor) -> Tensor:
    """Return the windows of a convolution that lie side by side: ``[B, rows * columns, C * height * width]``."""
    (height, width), (batch, channels) = weight.shape[2:], input.shape[:2]
    rows, columns = input.shape[2] // height, input.shape[3] // width
    whole = input[:, :, : rows * height, : columns * width]
    moved = whole.reshape(batch, channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
    return moved.reshape(batch, rows * columns, -1)


def arrange_in_grid(outputs: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """Reshape what a linear layer returned for the windows, ``[B, rows * columns, O]``, as the convolution does."""
    grid = (input.shape[2] // weight.shape[2], input.shape[3] // weight.shape[3])
    return outputs.transpose(1, 2).unflatten(2, grid)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FlatForm:
    """The flat rule of one layer; any layer, in any pass.

    Attributes:
        layer: the layer as a function of input, weight and bias.
        c: how much the sign is favoured.
    """

    layer: Layer
    c: float

    def keep(self, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> tuple[Tensor | None, ...]:
        """Return what the backward pass needs, beside the weight and the signs of x."""
        of_output, of_input = _mean_factors(weight)
        size = self.layer(x.abs(), of_input)  # one output
        if bias is None:
            size = size * by_output(of_output, weight)
        else:
            size = torch.addcmul(by_output(bias.abs(), weight), size, by_output(of_output, weight))
        return self._share(value, size).to(value.dtype), of_output, of_input

    def pull_back(self, grad: Tensor, signs: Tensor, weight: Tensor, *kept: Any) -> Tensor:
        """Compute the gradient of the inputs, whose signs are those of ``signs``."""
        share, of_output, of_input = (part.to(grad.dtype) for part in kept)
        buffer = share.abs().mul_(grad)  # and again below: memory that is new has to be cleared first
        plain = adjoint(self.layer, buffer, weight, signs)
        favoured = self._favoured(torch.mul(grad, share, out=buffer), of_output, of_input, signs)
        return plain.addcmul_(signs.sign().to(grad.dtype), favoured, value=self.c)

    def bias_part(self, x: Tensor, weight: Tensor, bias: Tensor, value: Tensor, *kept: Any) -> Tensor:
        """Compute the part of the output that is the bias's, with what ``keep`` returned."""
        share: Any = kept[0] if type(self) is FlatForm else FlatForm.keep(self, x, weight, bias, value)[0]
        return bias_part(by_output(bias, weight), share, self.c)

    @torch.no_grad()
    def _share(self, value: Tensor, size: Tensor) -> Tensor:
        """Compute s of z and a, in at least float32."""
        z = value.to(working_dtype(value.dtype))
        whole = self._whole(z, size)
        return torch.div(z, whole, out=whole)

    def _whole(self, z: Tensor, size: Tensor) -> Tensor:
        """Compute |z| + c a, above 0; where there is nothing to share, z is 0."""
        whole = z.abs().add_(size, alpha=self.c)
        return whole.clamp_min_(torch.finfo(whole.dtype).tiny)

    def _favoured(self, grad: Tensor, of_output: Tensor, of_input: Tensor, signs: Tensor) -> Tensor:
        if of_input.ndim == 2:
            return (grad @ of_output.flatten()).unsqueeze(-1) * of_input[0]
        summed = (grad * by_output(of_output, of_input)).sum(1 - of_input.ndim, keepdim=True)
        return adjoint(self.layer, summed, of_input, signs)


class TracedForm(FlatForm):
    """The flat rule of a linear layer for a compiler.

    Products with one row are written as sums, which are fused into the kernels beside them, and s is recomputed on the
    way back: of z, which is there anyway, and of one number a token.
    """

    def keep(self, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> tuple[Tensor | None, ...]:
        """Return what the backward pass needs."""
        of_output, of_input = _mean_factors(weight)
        wide = working_dtype(value.dtype)
        size = sum_last(x.to(wide).abs() * of_input[0].to(wide))  # [..., 1]
        return value, size, bias, of_output.flatten(), of_input

    def pull_back(self, grad: Tensor, signs: Tensor, weight: Tensor, *kept: Any) -> Tensor:
        """Compute the gradient of the inputs."""
        value, size, bias, of_output, of_input = kept
        amount = size * of_output if bias is None else size * of_output + bias.abs()
        share = self._share(value, amount)
        plain = (grad * share.abs()).to(grad.dtype) @ weight.to(grad.dtype)
        favoured = self.c * sum_last(grad * share * of_output) * of_input[0]
        signed = torch.where(signs > 0, favoured, torch.where(signs < 0, -favoured, 0))  # faster than a product
        return plain + signed

    def _share(self, value: Tensor, size: Tensor) -> Tensor:
        z = value.to(working_dtype(value.dtype))
        if z.dtype == value.dtype:
            return z / self._whole(z, size)
        root = self._whole(z, size).rsqrt()
        return z * (root * root)  # of half types, in a third of a quotient's instructions


class KernelForm(FlatForm):
    """The flat rule of a linear layer by three kernels (CUDA, Triton), each for all that is done to a row at a time.

    Of the weights they need the sums of absolute values alone, by input and by output: their product divided by the sum
    of all is the rank-one mean. The kernels divide, since they go over all of one anyway.
    """

    def keep(self, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor) -> tuple[Tensor | None, ...]:
        """Return what the backward pass needs."""
        of_output, of_input = (torch.linalg.vector_norm(weight, 1, dim, dtype=torch.float32) for dim in (1, 0))
        return value, kernels.load().row_sizes(_rows(x), of_input), bias, of_output, of_input

    def pull_back(self, grad: Tensor, signs: Tensor, weight: Tensor, *kept: Any) -> Tensor:
        """Compute the gradient of the inputs."""
        value, size, bias, of_output, of_input = kept
        shift, launch = None if bias is None else bias.contiguous(), kernels.load()
        shared, summed = launch.share_gradient(_rows(grad), _rows(value), size, shift, of_output, self.c)
        plain: Tensor = shared @ weight.to(grad.dtype)
        launch.add_favoured_(plain, _rows(signs), summed, of_input, self.c)
        return plain.view(signs.shape)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def sum_last(values: Tensor) -> Tensor:
    """Sum over the last axis, ``[..., 1]``; long rows in equal pieces that a compiler's kernel holds at once."""
    width = values.shape[-1]
    sizes = range(_MAX_ROW, 255, -1)
    piece = width if width <= _MAX_ROW else next((size for size in sizes if width % size == 0), width)
    pieces: Tensor = values.unflatten(-1, (-1, piece))
    return pieces.sum(-1).sum(-1, keepdim=True)


def choose_kernel_form(x: Tensor, weight: Tensor, *others: Tensor | None) -> type[FlatForm]:
    """Return the form by kernels where they take the tensors of a linear layer: they need the whole weight."""
    return KernelForm if whole_weight(weight)[0] is source_of(weight) and kernels.take(x, weight, *others) else FlatForm


def _mean_factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the mean of absolute weights; a part of a layer has its part of the layer's mean."""
    whole, outputs = whole_weight(weight)
    of_output, of_input = rank_one_factors(whole)
    return of_output[outputs], of_input


def flat_gamma(
    kind: PassKind,
    plain: Gamma,
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the flat rule in the form that serves a kind of pass."""
    if not (plain.flat and sees_all_inputs(call, input, weight)):
        return NotImplemented
    c = plain.favour(call, input, weight, bias)
    if c == 0.0:
        return weighted_sum(call, input, weight, bias, *args, **kwargs)

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return call.func(x, weight, bias, *args, **kwargs)  # type: ignore[no-any-return]

    def run(layer: Layer, value: Tensor, input: Tensor, weight: Tensor, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the layer's own value with the derivative of a form of the rule, arranged as the layer does."""
        x = input.detach()
        form = _choose_form(kind, x, weight, bias, value)(layer, c)
        # A model that runs itself may write over its tensors later: its signs are copied.
        signs = x.sign() if kind is PassKind.EAGER else same_signs(input)
        kept = form.keep(x, weight, bias, value)
        own = value if kind is PassKind.EAGER else value.data  # a view would be copied, lest it is written to
        carried = arrange(carry(lambda: own, form.pull_back, input, saved=(signs, weight, *kept)))
        if bias is None:
            return carried
        return call.mode.record_constant(
            carried, lambda: arrange(form.bias_part(x, weight, bias, value, *kept)), call.name
        )

    if call.name != "conv2d" or not are_windows_adjacent(input, weight, *args, **kwargs):
        return run(layer, layer(input.detach(), weight, bias), input, weight, lambda outputs: outputs)
    windows, matrix = windows_of(input, weight), weight.flatten(1)
    value = values_of_windows(input, weight, bias)
    return run(F.linear, value, windows, matrix, partial(arrange_in_grid, input=input, weight=weight))


for _kind in PassKind:
    register_substitute(Gamma, passes=(_kind,))(partial(flat_gamma, _kind))


def _choose_form(kind: PassKind, x: Tensor, weight: Tensor, *others: Tensor | None) -> type[FlatForm]:
    if kind is PassKind.EAGER or weight.ndim != 2:
        return FlatForm
    return TracedForm if kind is PassKind.TRACED else choose_kernel_form(x, weight, *others)
