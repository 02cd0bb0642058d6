"""Forward and backward passes of many batches of one size: recorded, compiled, or captured as one launch of a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable

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


class RecordedGradient:
    """Weights and logits of batches under a rule set, by a recording of the model where there is one.

    Args:
        model: any module that maps inputs to logits.
        rules: the derivatives in force.
        autocast: run the model under autocast with this type.
    """

    def __init__(self, model: nn.Module, rules: RuleSet, autocast: torch.dtype | None = None) -> None:
        self.recorded_model = RecordedModel(model, autocast)
        self.rules = rules

    def __call__(self, inputs: Tensor, target: Target, *, once: bool = False) -> tuple[Tensor, Tensor]:
        """Compute W ``[B, K, C, H, W]`` and logits ``[B, classes]`` for inputs ``[B, C, H, W]`` and a resolved target.

        Inputs of this form may not come again where ``once`` is set, so that no recording is made for them.
        """
        result = self.recorded_model.gradient(inputs, target, self.rules, once=once)
        return result.weight, result.logits

    def logits(self, inputs: Tensor) -> Tensor:
        """Compute the model's own logits ``[B, classes]``."""
        return compute_logits(self.recorded_model.model, inputs, autocast=self.recorded_model.autocast)


class CompiledGradient(RecordedGradient):
    """Weights and logits of batches of one size, traced once and compiled.

    The interception runs while tracing only: the graph holds plain tensor operations, in which the rules' derivatives
    are written out. Batches that are a little smaller are padded, so that one graph serves them too; it is traced
    again when the model has changed. Where compiling fails, or fast substitutes are switched off, the passes run
    without a graph; a failure is reported by one warning.
    """

    def __init__(self, model: nn.Module, rules: RuleSet, autocast: torch.dtype | None = None) -> None:
        super().__init__(model, rules, autocast)
        self._functions: dict[tuple[object, ...], dict[int, BatchFunction]] = {}  # by form, and by rows
        self._has_failed = False
        self._state: int | None = None  # of the model when the graphs were traced

    def __call__(self, inputs: Tensor, target: Target, *, once: bool = False) -> tuple[Tensor, Tensor]:
        """Compute W ``[B, K, C, H, W]`` and logits ``[B, classes]``, as the recorded form does."""
        arguments = [inputs, target.class_indices, *([] if target.weights is None else [target.weights])]
        function = self._find_function(self._compile, arguments)
        if function is None:
            return super().__call__(inputs, target)
        record_pass(inputs)
        weight, logits = function(*arguments)
        return weight, logits

    def logits(self, inputs: Tensor) -> Tensor:
        """Compute the model's own logits ``[B, classes]``; a small batch on a GPU does not wait for Python."""
        function = self._find_function(self._capture_forward, [inputs]) if inputs.is_cuda else None
        if function is None:
            return super().logits(inputs)
        record_pass(inputs)
        return function(inputs)[0]

    def _find_function(
        self, make: Callable[[list[Tensor]], BatchFunction | None], inputs: list[Tensor]
    ) -> BatchFunction | None:
        """Return what ``make`` returned for inputs of this form and as many rows, or less than twice as many."""
        if not is_enabled() or saved_tensor_hooks() is not None:  # which a graph would not call
            return None
        # A graph reads the model's parameters where they lie, and holds all else of the model as it was.
        fingerprint = fingerprint_model(self.recorded_model.model)
        if not fingerprint.is_recordable:
            return None
        if fingerprint.state != self._state:
            self._functions, self._state = {}, fingerprint.state
        first = inputs[0]
        key, rows = (make.__name__, first.dtype, first.device, *(part.shape[1:] for part in inputs)), len(first)
        known = self._functions.setdefault(key, {})
        size = min((size for size in known if rows <= size < 2 * rows), default=rows)
        if size not in known:
            function = make([part.contiguous() for part in inputs])
            if function is None:
                return None
            if (state := fingerprint_model(self.recorded_model.model).state) != self._state:
                self._functions, self._state = {key: (known := {})}, state  # its first pass filled a cache
            known[size] = function
        return known[size]

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
        return capture_cuda_graph(function, inputs)

    def _trace(self, inputs: list[Tensor]) -> BatchFunction:
        model, autocast = prepare_model(self.recorded_model.model), self.recorded_model.autocast
        check_soundness(model, inputs[0], self.rules, autocast)
        run = self.recorded_model.find_run(inputs[0])
        rules = substitute_rules(self.rules, PassKind.TRACED)

        def function(images: Tensor, columns: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            leaf, logits = forward(run, images, Interception(rules, model), autocast)
            scores = contrast_scores(logits, columns, *weights)  # [B, K]
            return torch.stack([weight for (weight,) in derivatives(scores, [leaf])], 1), logits.detach()

        state = fingerprint_model(model).state
        with isolate_pass(inputs[0]), count_passes():  # the graph is counted whenever it runs
            graph = make_fx(function)(*(part.detach().clone() for part in inputs))
        if fingerprint_model(model).state != state:
            raise RuntimeError("it changes with every pass")
        with torch.no_grad():  # the graph holds its derivatives already
            return compile_graph(graph, inputs)

    def _capture_forward(self, inputs: list[Tensor]) -> BatchFunction | None:
        """Return the forward pass alone, which needs no compiler to be one launch."""
        run, autocast = self.recorded_model.find_run(inputs[0]), self.recorded_model.autocast
        if run is self.recorded_model.model:
            return None  # it may read values, or change

        def function(images: Tensor) -> tuple[Tensor]:
            with torch.no_grad(), autocast_context(images, autocast):
                return (run(images),)

        return capture_cuda_graph(function, inputs)


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
