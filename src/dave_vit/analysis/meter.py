"""Time and memory of a piece of work, on the CPU and on the GPU."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class ResourceUse:
    """Seconds, and the largest number of bytes that tensors held at once beyond what was there before."""

    seconds: float
    peak_bytes: int


def measure(work: Callable[[], Any], device: torch.device, repeats: int = 3) -> ResourceUse:
    """The shortest time of some repeats and the peak memory of one more.

    Args:
        work: what is measured; it runs once beforehand to warm up.
        device: where it runs.
        repeats: the shortest counts, since other programs can only make it longer.
    """
    peak = _peak_on_gpu(work, device) if device.type == "cuda" else _peak_of_tensors(work)
    return ResourceUse(min(_seconds(work, device) for _ in range(repeats)), peak)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_on_gpu(work: Callable[[], Any], device: torch.device) -> int:
    work()  # libraries take their workspaces once
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    _wait(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _peak_of_tensors(work: Callable[[], Any]) -> int:
    tensors = _Tensors()
    with tensors:
        work()
    return tensors.peak


class _Tensors(TorchDispatchMode):
    """Adds up the memory of all tensors that are alive; what an operation needs inside of itself is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(one.untyped_storage()) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._take(one, given)
        return made

    def _take(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known or key in given:  # a view, or what was there before
            return
        size = storage.nbytes()
        self._known[key] = size
        self._alive += size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self._alive -= self._known.pop(key, 0)
