"""Passes of a GPU as CUDA graphs: one launch instead of the Python and the launches for which a small batch waits."""

import time
from collections.abc import Callable, Hashable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from dave_vit._internal.torch_private import own_workspaces, saved_tensor_hooks
from dave_vit.engine.fast import is_enabled
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.fast.recording import cast_weights_once
from dave_vit.engine.fingerprint import fingerprint_model
from dave_vit.engine.forward import count_passes, isolate_pass, record_pass
from dave_vit.errors import DaveError, is_out_of_memory

BatchFunction = Callable[..., tuple[Tensor, ...]]
"""A function of tensors to tensors, all with one row for each image."""
Compute = Callable[[], tuple[Tensor, ...]]
"""A function that computes a pass in Python."""


class FunctionCache:
    """Compiled or captured functions of batches, made again when the model changes.

    A function reads the model's parameters where they lie, and holds all else of the model as it was.

    Args:
        recorded_model: what the functions run.
    """

    def __init__(self, recorded_model: RecordedModel) -> None:
        self._recorded_model = recorded_model
        self.functions: dict[tuple[object, ...], dict[int, BatchFunction]] = {}  # by form, and by rows
        self._state: int | None = None  # of the model when they were made

    def find(
        self, make: Callable[[list[Tensor]], BatchFunction | None], inputs: list[Tensor], *form: Hashable
    ) -> BatchFunction | None:
        """Return a function for inputs of this form and as many rows, or less than twice as many.

        Args:
            make: makes the function for inputs, or returns None where there is none; then it is called again.
            inputs: one row for each image.
            form: what else the function depends on, with the name of ``make``.
        """
        if not is_enabled() or saved_tensor_hooks() is not None:  # which a graph would not call
            return None
        fingerprint = fingerprint_model(self._recorded_model.model)
        if not fingerprint.is_recordable:
            return None
        if fingerprint.state != self._state:
            self.functions, self._state = {}, fingerprint.state
        first = inputs[0]
        key = (make.__name__, *form, first.dtype, first.device, *(part.shape[1:] for part in inputs))
        known, rows = self.functions.setdefault(key, {}), len(first)
        size = min((size for size in known if rows <= size < 2 * rows), default=rows)
        if size not in known:
            function = make([part.contiguous() for part in inputs])
            if function is None:
                return None
            if (state := fingerprint_model(self._recorded_model.model).state) != self._state:
                self.functions, self._state = {key: (known := {})}, state  # its first pass filled a cache
            known[size] = function
        return known[size]


class CudaGraph:
    """A function as a CUDA graph, without Python and the launching of kernels, for which a small batch waits.

    Smaller batches are padded with what was there before. What is returned belongs to the caller.

    Args:
        function: computes on the device alone and, after its first call, reads no values.
        inputs: example inputs; others of their shapes, or with fewer rows, may follow.
        pool: memory that the graph shares with others, which never run at once with it.
    """

    def __init__(self, function: BatchFunction, inputs: list[Tensor], pool: Any = None) -> None:
        self._inputs = [part.clone() for part in inputs]
        self._function = function  # what its kernels read stays in memory as long as it does
        with torch.cuda.device(inputs[0].device):
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                function(*self._inputs)  # what is only set up on the first call cannot be captured
            current.wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            try:
                with own_workspaces(), torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                    reserved = torch.cuda.memory_reserved()
                    self._outputs = function(*self._inputs)
                    self.held_bytes = torch.cuda.memory_reserved() - reserved
            except Exception:
                torch.cuda.set_stream(current)  # a capture that fails leaves its own
                _reset_generator()
                raise

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the results for inputs of as many rows as were captured, or fewer."""
        rows = len(inputs[0])
        for buffer, part in zip(self._inputs, inputs, strict=True):
            buffer[:rows].copy_(part)
        with torch.cuda.device(inputs[0].device):
            self._graph.replay()
        return tuple(output[:rows].clone() for output in self._outputs)


def _reset_generator() -> None:
    """Take torch's generator out of a capture that failed, after which it would refuse to draw, by another capture."""
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def count_as(function: BatchFunction, passes: int) -> BatchFunction:
    """Return a function that counts as so many forward passes of each image whenever it runs."""

    def counted(*inputs: Tensor) -> tuple[Tensor, ...]:
        for _ in range(passes):
            record_pass(inputs[0])
        return function(*inputs)

    return counted


def capture_cuda_graph(function: BatchFunction, inputs: list[Tensor]) -> BatchFunction:
    """Return a function as a CUDA graph where it can be captured; else the function."""
    try:
        return CudaGraph(function, inputs)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return function


class Captures:
    """Passes of a model on a GPU, captured as CUDA graphs where they come again and wait for Python.

    Args:
        recorded_model: what the passes run.
    """

    def __init__(self, recorded_model: RecordedModel) -> None:
        self._recorded_model = recorded_model
        self._cache = FunctionCache(recorded_model)
        self._timings: dict[tuple[object, ...], PassTiming | None] = {}  # of each form; None where it is no graph
        self._pools: dict[bool, Any] = {}  # what runs beside another graph cannot share its memory
        self._side: torch.cuda.Stream | None = None

    def run(
        self,
        name: str,
        prepare: Callable[[Tensor], BatchFunction],
        inputs: list[Tensor],
        compute: Compute,
        *,
        beside: bool = False,
        has_model: bool = True,
    ) -> tuple[Tensor, ...]:
        """Return the results of a captured pass, or those of ``compute()``.

        Args:
            name: of the kind of pass.
            prepare: returns what to capture for images of a form.
            inputs: images and what else the pass takes, one row for each image.
            compute: computes the same in Python.
            beside: run a captured pass beside the next ones, on a stream of its own; ``join`` waits for it.
            has_model: whether the model runs in it.
        """
        if not inputs[0].is_cuda:
            return compute()
        key = (name, *((part.shape, part.dtype, part.device) for part in inputs))
        timing = self._timings.setdefault(key, PassTiming(inputs[0].device))

        def capture(inputs: list[Tensor]) -> BatchFunction | None:
            if timing is None or not timing.waits_for_host():
                return None
            if has_model and self._recorded_model.find_run(inputs[0]) is self._recorded_model.model:
                function = None  # it may read values, or change
            else:
                pool = self._pools.setdefault(beside, torch.cuda.graph_pool_handle())
                function = self._capture(prepare(inputs[0]), inputs, pool, passes=int(has_model))
            if function is None:
                self._timings[key] = None
            return function

        function = self._cache.find(capture, inputs, name)
        if function is not None:
            return self.run_beside(function, inputs) if beside else function(*inputs)
        with timing or nullcontext():
            return compute()

    def run_beside(self, function: BatchFunction, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Run a function on a GPU's stream for what runs beside others; ``join`` waits for it."""
        current = torch.cuda.current_stream(inputs[0].device)
        self._side = self._side or torch.cuda.Stream(inputs[0].device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            outputs = function(*inputs)
        for tensors, stream in ((inputs, self._side), (outputs, current)):
            for tensor in tensors:
                tensor.record_stream(stream)
        return outputs

    @property
    def are_used(self) -> bool:
        """Whether there are captured passes."""
        return any(self._cache.functions.values())

    def join(self) -> None:
        """Let the current stream wait for the pass that runs beside it."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def _capture(self, function: BatchFunction, inputs: list[Tensor], pool: Any, passes: int) -> BatchFunction | None:
        """Return the pass as a CUDA graph; None where it cannot be one, or would hold too much memory.

        It counts as ``passes`` forward passes of each image, or as those that it is seen to make.
        """

        def isolated(*inputs: Tensor) -> tuple[Tensor, ...]:
            nonlocal passes
            with isolate_pass(inputs[0]), cast_weights_once(), count_passes() as count:
                outputs = function(*inputs)
            passes = max(passes, count.passes // len(inputs[0]))
            return outputs

        try:
            graph = CudaGraph(isolated, inputs, pool)
        except (DaveError, RuntimeError):  # out of memory too: the pass itself needs less
            return None
        total = torch.cuda.get_device_properties(inputs[0].device).total_memory
        return count_as(graph, passes) if graph.held_bytes <= min(_MOST_HELD, total // 16) else None


_MOST_HELD = 4 * 2**30  # bytes of a captured pass, which it keeps; passes of more rows are long enough for Python
_BUSY = 1.25  # times as long as the host takes a device that does not wait for it


class PassTiming:
    """How long a pass takes on the host and on a GPU, measured by entering it as a context, without waiting.

    The first time does not count, since much is set up then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._entered, self._host = device, 0, 0.0

    def __enter__(self) -> None:
        self._entered += 1
        with torch.cuda.device(self._device):
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._start.record()
        self._host = -time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._host += time.perf_counter()
        with torch.cuda.device(self._device):
            self._end.record()

    def waits_for_host(self) -> bool:
        """Return whether the GPU was done about when the host was; False while that is not known."""
        if self._entered < 2 or not self._end.query():
            return False
        return bool(self._start.elapsed_time(self._end) < 1e3 * _BUSY * self._host)
