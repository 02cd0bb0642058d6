"""The autograd graph: which derivatives, leaves and hooks may be in it, and the memory of the tensors that it saves."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit.engine.calls import Surrogate
from dave_vit.errors import CheckpointingError, UnsupportedOperator


def check_saved_hooks(hooks: Any) -> None:
    """Refuse hooks that recompute (checkpointing) or are unknown; those of torch itself only store elsewhere."""
    home = getattr(hooks[0], "__module__", "an unknown module") if hooks else "torch.autograd.graph"
    if home == "torch.utils.checkpoint":
        raise checkpointing_error()
    if home not in ("torch.autograd.graph", __name__):
        raise UnsupportedOperator(
            f"the model changes the tensors that autograd saves, by a hook of {home}; remove the hook"
        )


def checkpointing_error() -> CheckpointingError:
    """Return the error for models that recompute their forward pass during the backward pass."""
    return CheckpointingError(
        "the model uses gradient checkpointing, which runs the forward pass again outside of the interception; "
        "switch it off, for example model.set_grad_checkpointing(False) or model.gradient_checkpointing_disable()"
    )


def check_graph(output: Tensor, leaf: Tensor | None = None) -> None:
    """Refuse a graph with derivatives that are not the rules', or with leaves that are not the input.

    Args:
        output: what is explained.
        leaf: the input; a parameter at the end of a graph shows that a part of the model ran out of the interception's
            sight. None where there was no interception.
    """
    for node in _nodes(output):
        variable = getattr(node, "variable", None)
        if leaf is not None and variable is not None and variable is not leaf:
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


class SavedMemory(torch.autograd.graph.saved_tensors_hooks):
    """Context that counts the bytes of tensors that autograd saves inside, each memory once and as long as it lives.

    Args:
        model: its parameters and buffers are in memory anyway. Copies of its weights in another type, as autocast makes
            them, are counted apart: they do not grow with the batch.

    Attributes:
        peak: the most bytes at one time.
        largest: bytes of the largest tensor.
        fixed: the most bytes of copies of weights at one time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self._held = _addresses(model)
        weights = [tensor for tensor in model.parameters() if tensor.ndim in (2, 4)]
        self._weights = {shape for tensor in weights for shape in (tensor.shape, tensor.mT.shape)}
        self._known: set[int] = set()
        self._live = {True: 0, False: 0}  # bytes of copies of weights, and of all else
        self.peak = self.largest = self.fixed = 0

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._held and address not in self._known:
            is_weight = tensor.shape in self._weights
            self._known.add(address)
            weakref.finalize(storage, self._release, address, is_weight, size)
            self._live[is_weight] += size
            self.peak, self.fixed = max(self.peak, self._live[False]), max(self.fixed, self._live[True])
            self.largest = max(self.largest, 0 if is_weight else size)
        return tensor.detach()  # the result of a node, saved by itself, would keep its graph alive

    def _release(self, address: int, is_weight: bool, size: int) -> None:  # noqa: FBT001
        self._known.discard(address)
        self._live[is_weight] -= size


def offload_saved(model: nn.Module) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which autograd keeps what it saves in main memory, but for the model's own tensors.

    Derivatives are the same: unlike checkpointing, no code of the model runs again.
    """
    held = _addresses(model)

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in held:
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, copy.copy_(tensor)

    def unpack(kept: Any) -> Any:
        return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _addresses(model: nn.Module) -> set[int]:
    """Return where the parameters and buffers of a model lie."""
    return {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
