"""Forward and backward passes of many batches of one size: recorded, compiled, or captured as one launch of a GPU."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit._internal.torch_private import compile_graph, make_fx, saved_tensor_hooks
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fast import PassKind, is_enabled, substitute_rules
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.fingerprint import fingerprint_model
from dave_vit.engine.forward import (
    autocast_context,
    compute_logits,
    count_passes,
    forward,
    isolate_pass,
    prepare_model,
    record_pass,
)
from dave_vit.engine.gradient import derivatives
from dave_vit.engine.interception import Interception
from dave_vit.engine.soundness import check_soundness
from dave_vit.engine.targets import Target, contrast_scores
from dave_vit.errors import DaveError, is_out_of_memory


class FunctionCache:
    """Compiled or captured functions of batches, made again when the model changes.

    A function reads the model's parameters where they lie, and holds all else of the model as it was.

    Args:
        recorded_model: what the functions run.
    """

    def __init__(self, recorded_model: RecordedModel) -> None:
        self._recorded_model = recorded_model
        self._functions: dict[tuple[object, ...], dict[int, BatchFunction | None]] = {}  # by form, and by rows
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
            self._functions, self._state = {}, fingerprint.state
        first = inputs[0]
        key = (make.__name__, *form, first.dtype, first.device, *(part.shape[1:] for part in inputs))
        known, rows = self._functions.setdefault(key, {}), len(first)
        size = min((size for size in known if rows <= size < 2 * rows), default=rows)
        if size not in known:
            function = make([part.contiguous() for part in inputs])
            if function is None:
                return None
            if (state := fingerprint_model(self._recorded_model.model).state) != self._state:
                self._functions, self._state = {key: (known := {})}, state  # its first pass filled a cache
            known[size] = function
        return known[size]


class RecordedGradient:
    """Weights and logits of batches under a rule set, by a recording of the model where there is one.

    On a GPU, passes that come again and wait for Python are captured as CUDA graphs.

    Args:
        model: any module that maps inputs to logits.
        rules: the derivatives in force.
        autocast: run the model under autocast with this type.
    """

    def __init__(self, model: nn.Module, rules: RuleSet, autocast: torch.dtype | None = None) -> None:
        self.recorded_model = RecordedModel(model, autocast)
        self.rules = rules
        self.captures = Captures(self.recorded_model)
        self._cache = FunctionCache(self.recorded_model)

    def __call__(self, inputs: Tensor, target: Target, *, once: bool = False) -> tuple[Tensor, Tensor]:
        """Compute W ``[B, K, C, H, W]`` and logits ``[B, classes]`` for inputs ``[B, C, H, W]`` and a resolved target.

        Inputs of this form may not come again where ``once`` is set, so that no recording is made for them.
        """

        def compute() -> tuple[Tensor, ...]:
            result = self.recorded_model.gradient(inputs, target, self.rules, once=once)
            return result.weight, result.logits

        if once or target.score is not None or not inputs.is_cuda:
            weight, logits = compute()
        else:
            weight, logits = self.captures.run(
                "gradient", self._gradient_function, target_tensors(inputs, target), compute
            )
        return weight, logits

    def logits(self, inputs: Tensor) -> Tensor:
        """Compute the model's own logits ``[B, classes]``; a small batch on a GPU does not wait for Python."""

        def compute() -> tuple[Tensor, ...]:
            return (compute_logits(self.recorded_model.model, inputs, autocast=self.recorded_model.autocast),)

        return (
            self.captures.run("forward", self._forward_function, [inputs], compute)[0]
            if inputs.is_cuda
            else compute()[0]
        )

    def _gradient_function(self, inputs: Tensor, kind: PassKind = PassKind.RECORDED) -> BatchFunction:
        """Return a function of images, class indices and weights to W and logits, which reads no values."""
        model, autocast = prepare_model(self.recorded_model.model), self.recorded_model.autocast
        check_soundness(model, inputs, self.rules, autocast)
        run, rules = self.recorded_model.find_run(inputs), substitute_rules(self.rules, kind)

        def function(images: Tensor, columns: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            leaf, logits = forward(run, images, Interception(rules, model), autocast)
            scores = contrast_scores(logits, columns, *weights)  # [B, K]
            return torch.stack([weight for (weight,) in derivatives(scores, [leaf])], 1), logits.detach()

        return function

    def _forward_function(self, inputs: Tensor) -> BatchFunction:
        run, autocast = self.recorded_model.find_run(inputs), self.recorded_model.autocast

        def function(images: Tensor) -> tuple[Tensor]:
            with torch.no_grad(), autocast_context(images, autocast):
                return (run(images),)

        return function


def target_tensors(inputs: Tensor, target: Target) -> list[Tensor]:
    """Return what a function of a resolved target takes: images, class indices and, of a contrast, weights."""
    return [inputs, target.class_indices, *([] if target.weights is None else [target.weights])]


class CompiledGradient(RecordedGradient):
    """Weights and logits of batches of one size, traced once and compiled.

    The interception runs while tracing only: the graph holds plain tensor operations, in which the rules' derivatives
    are written out. Batches that are a little smaller are padded, so that one graph serves them too; it is traced
    again when the model has changed. Where compiling fails, or fast substitutes are switched off, the passes run
    without a graph; a failure is reported by one warning.
    """

    _has_failed = False

    def __call__(self, inputs: Tensor, target: Target, *, once: bool = False) -> tuple[Tensor, Tensor]:
        """Compute W ``[B, K, C, H, W]`` and logits ``[B, classes]``, as the recorded form does."""
        arguments = target_tensors(inputs, target)
        function = self._cache.find(self._compile, arguments)
        if function is None:
            return super().__call__(inputs, target)
        record_pass(inputs)
        weight, logits = function(*arguments)
        return weight, logits

    def _compile(self, inputs: list[Tensor]) -> BatchFunction | None:
        """Return a graph that has run on these images, class indices and weights."""
        if self._has_failed:
            return None
        try:
            function = _pad_batch(self._trace(inputs), len(inputs[0]))
            function(*inputs)
        except (DaveError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            self._has_failed = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the model could not be compiled ({first}); it runs without", stacklevel=2)
            return None
        return capture_cuda_graph(function, inputs) if inputs[0].is_cuda else function

    def _trace(self, inputs: list[Tensor]) -> BatchFunction:
        model = self.recorded_model.model
        function = self._gradient_function(inputs[0], PassKind.TRACED)
        state = fingerprint_model(model).state
        with isolate_pass(inputs[0]), count_passes():  # the graph is counted whenever it runs
            graph = make_fx(function)(*(part.detach().clone() for part in inputs))
        if fingerprint_model(model).state != state:
            raise RuntimeError("it changes with every pass")
        with torch.no_grad():  # the graph holds its derivatives already
            return compile_graph(graph, inputs)


def _pad_batch(function: BatchFunction, batch: int) -> BatchFunction:
    """Return a function of ``batch`` rows that takes fewer: the first row is repeated where some are missing."""

    @torch.no_grad()
    def padded(*inputs: Tensor) -> tuple[Tensor, ...]:
        rows = len(inputs[0])
        missing = batch - rows
        full = [torch.cat([part, part[:1].expand(missing, *part.shape[1:])]) if missing else part for part in inputs]
        return tuple(output[:rows] for output in function(*(part.contiguous() for part in full)))

    return padded


BatchFunction = Callable[..., tuple[Tensor, ...]]
"""A function of tensors to tensors, all with one row for each image."""


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
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                reserved = torch.cuda.memory_reserved()
                self._outputs = function(*self._inputs)
                self.held_bytes = torch.cuda.memory_reserved() - reserved

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the results for inputs of as many rows as were captured, or fewer."""
        rows = len(inputs[0])
        for buffer, part in zip(self._inputs, inputs, strict=True):
            buffer[:rows].copy_(part)
        with torch.cuda.device(inputs[0].device):
            self._graph.replay()
        return tuple(output[:rows].clone() for output in self._outputs)


def capture_cuda_graph(function: BatchFunction, inputs: list[Tensor], pool: Any = None) -> BatchFunction:
    """Return a function as a CUDA graph where it can be captured; else the function."""
    try:
        return CudaGraph(function, inputs, pool)
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
        self._pool: Any = None

    def run(
        self,
        name: str,
        prepare: Callable[[Tensor], BatchFunction],
        inputs: list[Tensor],
        compute: Callable[[], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Return the results of a captured pass, or those of ``compute()``.

        Args:
            name: of the kind of pass.
            prepare: returns what to capture for images of a form.
            inputs: images and what else the pass takes, one row for each image.
            compute: computes the same in Python.
        """
        if not inputs[0].is_cuda:
            return compute()
        key = (name, *((part.shape, part.dtype, part.device) for part in inputs))
        timing = self._timings.setdefault(key, PassTiming(inputs[0].device))

        def capture(inputs: list[Tensor]) -> BatchFunction | None:
            if timing is None or not timing.waits_for_host():
                return None
            function = self._capture(prepare, inputs)
            if function is None:
                self._timings[key] = None
            return function

        function = self._cache.find(capture, inputs, name)
        if function is not None:
            record_pass(inputs[0])
            return function(*inputs)
        with timing or nullcontext():
            return compute()

    def _capture(self, prepare: Callable[[Tensor], BatchFunction], inputs: list[Tensor]) -> BatchFunction | None:
        """Return the pass as a CUDA graph; None where it cannot be one, or would hold too much memory."""
        if self._recorded_model.find_run(inputs[0]) is self._recorded_model.model:
            return None  # it may read values, or change
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        function = prepare(inputs[0])

        def isolated(*inputs: Tensor) -> tuple[Tensor, ...]:
            with isolate_pass(inputs[0]), count_passes():  # passes are counted whenever the graph runs
                return function(*inputs)

        try:
            graph = CudaGraph(isolated, inputs, self._pool)
        except (DaveError, RuntimeError):  # out of memory too: the pass itself needs less
            return None
        total = torch.cuda.get_device_properties(inputs[0].device).total_memory
        return graph if graph.held_bytes <= min(_MOST_HELD, total // 16) else None


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
