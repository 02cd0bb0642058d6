"""A computation on a GPU as one launch: its kernels are recorded once, and played again on other inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dave_vit.errors import is_out_of_memory

Step = Callable[..., tuple[Tensor, ...]]


class Replayed:
    """A step as a CUDA graph: Python and the launching of kernels, which a small batch waits for, are left out.

    Smaller batches are filled up with what was there before. What is returned belongs to the caller.

    Args:
        step: computes on the device alone and looks at no values; its inputs and results have a row for each image.
        given: inputs; others of their shapes, or with fewer rows, may follow.
    """

    def __init__(self, step: Step, given: list[Tensor]) -> None:
        self._given = [part.clone() for part in given]
        self._step = step  # what its kernels read stays where it is as long as it is there
        with torch.cuda.device(given[0].device):
            beside, here = torch.cuda.Stream(), torch.cuda.current_stream()
            beside.wait_stream(here)
            with torch.cuda.stream(beside):
                step(*self._given)  # what is only set up on the first call cannot be recorded
            here.wait_stream(beside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._made = step(*self._given)

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The results for inputs of as many rows as were recorded, or fewer."""
        rows = len(given[0])
        for place, part in zip(self._given, given, strict=True):
            place[:rows].copy_(part)
        with torch.cuda.device(given[0].device):
            self._graph.replay()
        return tuple(made[:rows].clone() for made in self._made)


def replayed(step: Step, given: list[Tensor]) -> Step:
    """The step as one launch where its inputs are on a CUDA device and it can be recorded; else as it is."""
    if not given[0].is_cuda:
        return step
    try:
        return Replayed(step, given)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return step
