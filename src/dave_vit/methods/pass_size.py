"""Batches of any size: rows go through a model in passes, which are halved where memory does not suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from dave_vit.engine.forward import Read, compute_logits
from dave_vit.engine.targets import class_logits
from dave_vit.errors import is_out_of_memory

T = TypeVar("T")


class PassSize:
    """How many rows (images, or images times samples) one forward pass of a call may take.

    A call of a method makes one and uses it throughout, so that what it learnt of the memory holds until its end.

    Args:
        rows: the most to begin with.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def run_chunks(self, compute: Callable[[int, int], T], count: int) -> list[T]:
        """``compute(start, stop)`` for all of ``count`` rows, one part after another; runs may be nested."""
        parts: list[T] = []
        start = 0
        while start < count:
            stop = min(start + self.rows, count)
            try:
                parts.append(compute(start, stop))
                start = stop
                continue
            except (RuntimeError, MemoryError) as error:
                if self.rows == 1 or not is_out_of_memory(error):
                    raise
            # Outside of the handler, so that the failed pass is freed first.
            torch.cuda.empty_cache()
            self.rows = max(1, min(self.rows, stop - start) // 2)
        return parts

    def samples_per_pass(self, images: Tensor) -> int:
        """How many samples of each of these images fit into a pass."""
        return max(1, self.rows // len(images))


def even_chunk_size(count: int, most: int) -> int:
    """How many of ``count`` to take at once, at most ``most`` and not much less, so that little is missing at the end.

    A graph that was compiled for a batch of one size is filled up where a batch is smaller.

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
    """The logits of the images themselves, ``[B, classes]``, or what else is read out of the model's output."""

    def said(start: int, stop: int) -> Tensor:
        return compute_logits(model, images[start:stop], read, autocast)

    return torch.cat(pass_size.run_chunks(said, len(images)))
