"""The size of forward passes: rows are processed in chunks, halved when memory does not suffice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from dave_vit.engine.forward import Read, compute_logits
from dave_vit.engine.saved_memory import offload_saved
from dave_vit.engine.targets import class_logits
from dave_vit.errors import is_out_of_memory
from dave_vit.methods.memory import PassForm

T = TypeVar("T")


class PassSize:
    """The largest number of rows (images, or images times samples) in one forward pass of a call.

    One object is used for a whole call of a method, so that a size that was halved once stays so until its end.

    Args:
        rows: the most to begin with.
        budget: bytes that a pass may take; None for no limit.
        model: its passes may keep tensors in main memory if one row is too large; None if they are there anyway.
    """

    def __init__(self, rows: int, budget: int | None = None, model: nn.Module | None = None) -> None:
        self.rows, self.budget, self._model = rows, budget, model
        self.is_offloaded = False

    def limit_rows(self, rows: int, form: PassForm, images: Tensor) -> int:
        """Return how many rows, up to ``rows``, of a form of pass fit into the budget; images are its inputs."""
        memory = None if self.budget is None else form.measure(images[:1])
        if memory is None or self.budget is None:
            return rows
        if memory.fixed + memory.row > self.budget:
            self._offload()
        return min(rows, memory.rows_within(self.budget))

    def _offload(self) -> bool:
        """Keep saved tensors in main memory from here on, if that is another memory; returns whether it is."""
        if self._model is not None and not self.is_offloaded:
            self.is_offloaded = True
            message = "a pass of one image does not fit into the device's memory; main memory is used too, slower"
            warnings.warn(message, stacklevel=2)
        return self.is_offloaded

    def run_chunks(self, compute: Callable[[int, int], T], count: int) -> list[T]:
        """Call ``compute(start, stop)`` for all of ``count`` rows, chunk by chunk; calls may be nested."""
        parts: list[T] = []
        start = 0
        while start < count:
            stop, was_offloaded = min(start + self.rows, count), self.is_offloaded
            try:
                with offload_saved(self._model) if self._model and was_offloaded else nullcontext():
                    parts.append(compute(start, stop))
                start = stop
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or (self.rows == 1 and (was_offloaded or not self._offload())):
                    raise
            # Outside of the handler, so that the failed pass is freed first.
            torch.cuda.empty_cache()
            self.rows = max(1, min(self.rows, stop - start) // 2)
        return parts

    def samples_per_pass(self, images: Tensor) -> int:
        """Return how many samples of each of these images fit into a pass."""
        return max(1, self.rows // len(images))


def even_chunk_size(count: int, most: int) -> int:
    """Return a chunk size of at most ``most`` with which the last chunk lacks as little as possible.

    Batches smaller than the one a graph was compiled for are padded, and padding is wasted work.

    Args:
        count: how many there are.
        most: as memory allows.
    """
    most = min(most, count)
    sizes = range(most // 2 + 1, most + 1)
    return min(reversed(sizes), key=lambda size: -(-count // size) * size)


def clean_logits(
    model: nn.Module,
    images: Tensor,
    pass_size: PassSize,
    read: Read = class_logits,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """Compute the logits of the clean images ``[B, classes]``, or what ``read`` selects from the output."""

    def compute(start: int, stop: int) -> Tensor:
        return compute_logits(model, images[start:stop], read, autocast)

    return torch.cat(pass_size.run_chunks(compute, len(images)))
