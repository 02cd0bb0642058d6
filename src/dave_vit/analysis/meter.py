"""Time and peak memory of a function, on the CPU and on the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dave_vit._internal.torch_private import TorchDispatchMode, tree_leaves
from dave_vit.evaluate.scoring import synchronized_time


@dataclass(frozen=True)
class ResourceUse:
    """Seconds, and the most bytes that tensors held at once beyond those before."""

    seconds: float
    peak_bytes: int

    @property
    def mib(self) -> float:
        """Peak memory in MiB."""
        return self.peak_bytes / 2**20


def measure(work: Callable[[], Any], device: torch.device, repeats: int = 3) -> ResourceUse:
    """Measure the shortest time of some repeats and the peak memory of one more.

    Args:
        work: function to measure; it runs once beforehand to warm up.
        device: device it runs on.
        repeats: the shortest counts, since other programs can only make it longer.
    """
    if device.type == "cuda":
        peak = _peak_on_gpu(work, device)
    else:
        with _TensorMemory() as memory:
            work()
        peak = memory.peak
    return ResourceUse(min(_time(work, device) for _ in range(repeats)), peak)


def _time(work: Callable[[], Any], device: torch.device) -> float:
    start = synchronized_time(device)
    work()
    return synchronized_time(device) - start


def _peak_on_gpu(work: Callable[[], Any], device: torch.device) -> int:
    work()  # libraries allocate their workspaces once
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return int(torch.cuda.max_memory_allocated(device) - before)


class _TensorMemory(TorchDispatchMode):
    """Sums the memory of all live tensors; memory that an operation uses internally is not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._sizes: dict[int, int] = {}  # by the storage's id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {id(storage) for storage in _storages((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            if id(storage) not in self._sizes and id(storage) not in arguments:  # no view, and not there before
                self._sizes[id(storage)] = storage.nbytes()
                self._live += storage.nbytes()
                self.peak = max(self.peak, self._live)
                weakref.finalize(storage, self._drop, id(storage))
        return output

    def _drop(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
