"""A computation on a GPU as one launch: its kernels are captured once and replayed on other inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dave_vit.errors import is_out_of_memory

BatchFunction = Callable[..., tuple[Tensor, ...]]
"""A function of tensors to tensors, all with one row for each image."""


class CudaGraph:
    """A function as a CUDA graph, without Python and the launching of kernels, for which a small batch waits.

    Smaller batches are padded with what was there before. What is returned belongs to the caller.

    Args:
        function: computes on the device alone and reads no values.
        inputs: example inputs; others of their shapes, or with fewer rows, may follow.
    """

    def __init__(self, function: BatchFunction, inputs: list[Tensor]) -> None:
        self._inputs = [part.clone() for part in inputs]
        self._function = function  # what its kernels read stays in memory as long as it does
        with torch.cuda.device(inputs[0].device):
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                function(*self._inputs)  # what is only set up on the first call cannot be captured
            current.wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._outputs = function(*self._inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the results for inputs of as many rows as were captured, or fewer."""
        rows = len(inputs[0])
        for buffer, part in zip(self._inputs, inputs, strict=True):
            buffer[:rows].copy_(part)
        with torch.cuda.device(inputs[0].device):
            self._graph.replay()
        return tuple(output[:rows].clone() for output in self._outputs)


def capture_cuda_graph(function: BatchFunction, inputs: list[Tensor]) -> BatchFunction:
    """Return a function as a CUDA graph where its inputs are on CUDA and it can be captured; else the function."""
    if not inputs[0].is_cuda:
        return function
    try:
        return CudaGraph(function, inputs)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return function
