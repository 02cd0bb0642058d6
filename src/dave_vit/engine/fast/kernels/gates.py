"""What goes back through GELU and SiLU with their gate held, in one kernel (CUDA, Triton)."""

from __future__ import annotations

from torch import Tensor

from dave_vit.engine.fast.kernels.attention import operators, takes


def applicable(*tensors: Tensor) -> bool:
    """Whether the kernel takes these tensors; what it does not take runs in plain torch functions."""
    return all(one.is_contiguous() for one in tensors) and takes(*tensors)


def gate_gradient(grad: Tensor, x: Tensor, *, kind: str, at_zero: float) -> Tensor:
    """grad * phi(x), with phi = f(x) / x of the activation f; both contiguous and of one shape.

    Args:
        grad: of what the activation returned.
        x: what it was given.
        kind: "gelu", "tanh" for its approximation, or "silu".
        at_zero: phi(0).
    """
    pulled: Tensor = operators().gate_gradient(grad, x, kind=kind, at_zero=at_zero)
    return pulled
