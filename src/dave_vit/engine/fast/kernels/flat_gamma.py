"""The flat gamma rule of a linear layer: what goes over its rows beside the products, in three kernels (CUDA, Triton).

Of the weights it needs the sums of absolute values alone, by input and by output, ``of_input`` and ``of_output``: their
product divided by the sum of all is the rank-one mean. The kernels divide, since they go over all of one anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dave_vit.engine.fast.kernels.attention import operators, takes


def applicable(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these tensors; what they do not take runs in plain torch functions."""
    return takes(*tensors)


def absolute_sums(weight: Tensor) -> tuple[Tensor, Tensor]:
    """By output ``[O]`` and by input ``[I]`` of a weight ``[O, I]``, in float32."""
    of_output, of_input = (torch.linalg.vector_norm(weight, 1, dim, dtype=torch.float32) for dim in (1, 0))
    return of_output, of_input


def sizes(x: Tensor, of_input: Tensor) -> Tensor:
    """sum |x_i| v_i of each row, in float32: ``[rows]`` for ``[..., I]``."""
    found: Tensor = operators().row_sizes(_rows(x), of_input)
    return found


def shared(
    grad: Tensor, value: Tensor, size: Tensor, bias: Tensor | None, of_output: Tensor, *, favour: float
) -> tuple[Tensor, Tensor]:
    """grad * |s| ``[rows, O]``, and sum grad_j s_j u_j of each row ``[rows]``.

    Args:
        grad: of what the layer returned, ``[..., O]``.
        value: z, what it returned.
        size: of its inputs, see ``sizes``.
        bias: of the layer.
        of_output: sums of absolute weights ``[O]``.
        favour: c.
    """
    shift = None if bias is None else bias.contiguous()
    made: tuple[Tensor, Tensor] = operators().shared(_rows(grad), _rows(value), size, shift, of_output, favour)
    return made


def add_favoured_(plain: Tensor, like: Tensor, summed: Tensor, of_input: Tensor, *, favour: float) -> Tensor:
    """plain + c sign(like) summed v, written over ``plain``: in the shape of ``like``.

    Args:
        plain: what the product with the weight gave, ``[rows, I]``.
        like: has the signs of the layer's input ``[..., I]``.
        summed: of each row, see ``shared``.
        of_input: sums of absolute weights ``[I]``.
        favour: c.
    """
    operators().add_favoured_(plain, _rows(like), summed, of_input, favour)
    return plain.view(like.shape)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
