"""Memory of a pass: what autograd keeps between a forward pass and the derivatives, counted or kept elsewhere."""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch import Tensor, nn


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

    def __enter__(self) -> Self:  # type: ignore[override]
        super().__enter__()
        return self

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
