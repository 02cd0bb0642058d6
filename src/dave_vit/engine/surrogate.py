"""A value with a chosen derivative: the one primitive that all rules are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pullback = Callable[..., "Tensor | tuple[Tensor | None, ...]"]


class Surrogate(torch.autograd.Function):
    """Function that returns ``compute()`` unchanged and sends gradients to the carriers through ``pullback``.

    The forward value is what the model's own kernel returns, bit for bit; only the derivative is replaced.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], Tensor], pullback: Pullback, saved: tuple[Tensor | None, ...], *carriers: Tensor
    ) -> Tensor:
        """Evaluate without recording."""
        ctx.pullback = pullback
        ctx.save_for_backward(*saved)  # and not a closure: autograd then notices a later in-place write
        value = compute()
        return value if value._base is None else value.clone()  # the model could not write into a view in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Apply the pullback; the first three arguments of forward carry nothing."""
        pulled = ctx.pullback(grads[0], *ctx.saved_tensors)
        return (None, None, None, *(pulled if isinstance(pulled, tuple) else (pulled,)))


def carry(
    compute: Callable[[], Tensor], pullback: Pullback, *carriers: Tensor, saved: tuple[Tensor | None, ...] = ()
) -> Tensor:
    """Return the value of ``compute()`` with a chosen derivative with respect to ``carriers``.

    Args:
        compute: returns the forward value, as a tensor of its own (no view of a carrier).
        pullback: ``pullback(grad, *saved)`` returns the gradient of the carrier, or a tuple of them.
        carriers: the tensors that carry gradient.
        saved: tensors that the pullback needs.
    """
    return Surrogate.apply(compute, pullback, saved, *carriers)  # type: ignore[no-any-return,no-untyped-call]
