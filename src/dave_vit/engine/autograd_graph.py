"""Checks of the autograd graph: which derivatives, leaves and hooks may be in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from dave_vit.engine.calls import Surrogate
from dave_vit.errors import CheckpointingError, UnsupportedOperator


def check_saved_tensor_hooks(hooks: Any) -> None:
    """Refuse hooks that recompute (checkpointing) or are unknown; those of torch itself only store elsewhere."""
    home = getattr(hooks[0], "__module__", "an unknown module") if hooks else "torch.autograd.graph"
    if home == "torch.utils.checkpoint":
        raise checkpointing_error()
    if home not in ("torch.autograd.graph", "dave_vit.engine.saved_memory"):
        raise UnsupportedOperator(
            f"the model changes the tensors that autograd saves, by a hook of {home}; remove the hook"
        )


def checkpointing_error() -> CheckpointingError:
    """Return the error for models that recompute their forward pass during the backward pass."""
    return CheckpointingError(
        "the model uses gradient checkpointing, which runs the forward pass again outside of the interception; "
        "switch it off, for example model.set_grad_checkpointing(False) or model.gradient_checkpointing_disable()"
    )


def check_graph(output: Tensor, leaves: tuple[Tensor, ...] | None = None) -> None:
    """Refuse a graph with derivatives that are not the rules', or with leaves that are not the input.

    Args:
        output: what is explained.
        leaves: the input and the recorded constants; a parameter at the end of a graph shows that a part of the model
            ran out of the interception's sight. None where there was no interception.
    """
    known = {id(leaf) for leaf in leaves or ()}
    for node in _nodes(output):
        variable = getattr(node, "variable", None)
        if leaves is not None and variable is not None and id(variable) not in known:
            raise hidden_error(f"the gradient of a parameter of shape {tuple(variable.shape)}")
        forward = getattr(node, "_forward_cls", None)
        if forward is not None and forward is not Surrogate:
            raise _foreign_function(forward)


def is_function_of(output: Tensor, leaves: Iterable[Tensor]) -> bool:
    """Return whether a graph ends in these leaves alone."""
    known = {id(leaf) for leaf in leaves}
    return all(id(getattr(node, "variable", None)) in known for node in _nodes(output) if not node.next_functions)


def _nodes(output: Tensor) -> Iterator[Any]:
    """Yield the nodes of a graph."""
    todo: list[Any] = [output.grad_fn]
    visited = set()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        todo.extend(parent for parent, _ in node.next_functions)
        yield node


def reject_gradient_changes(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    """Wrap a hook on a gradient so that it may read the gradient but not change it."""

    def check(grad: Tensor) -> None:
        before = grad._version
        if hook(grad) is not None or grad._version != before:
            raise UnsupportedOperator(
                "a hook of the model changes a gradient, and so the map; let the hook return None, or remove it"
            )

    return check


def hidden_error(what: str, where: str = "") -> UnsupportedOperator:
    """Return the error for what was computed out of the interception's sight."""
    return UnsupportedOperator(
        f"{what}{where} was made out of the interception's sight: by torch.jit, by torch.func, in another thread, with "
        "torch functions switched off, or before the call; run the plain module in the calling thread, and detach what "
        "is a constant"
    )


def _foreign_function(forward: Any) -> Exception:
    if "Checkpoint" in forward.__name__:
        return checkpointing_error()
    if forward.__module__ == "torch.nn.modules.module" or "BackwardHook" in forward.__name__:
        return UnsupportedOperator(
            "a module of the model has a backward hook, which may change the map; remove the hook"
        )
    return UnsupportedOperator(
        f"the custom autograd function {forward.__module__}.{forward.__qualname__} is not supported: its derivative "
        "cannot be intercepted; use plain torch functions instead"
    )
