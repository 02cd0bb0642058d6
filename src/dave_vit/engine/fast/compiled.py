"""Forward and backward passes of many batches of one size: recorded, compiled, or captured as one launch of a GPU."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dave_vit._internal.torch_private import compile_graph, trace_graph
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fast import PassKind, substitute_rules
from dave_vit.engine.fast.cuda_graphs import (
    BatchFunction,
    Captures,
    Compute,
    FunctionCache,
    capture_cuda_graph,
    count_as,
)
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.fingerprint import cache_fingerprints, fingerprint_model
from dave_vit.engine.forward import autocast_context, compute_logits, count_passes, forward, isolate_pass
from dave_vit.engine.gradient import derivatives
from dave_vit.engine.interception import Interception
from dave_vit.engine.soundness import check_soundness
from dave_vit.engine.targets import Target, contrast_scores
from dave_vit.errors import DaveError

Prepare = Callable[..., BatchFunction]
"""``prepare(images, kind=PassKind.RECORDED)``: returns what to capture or to trace for images of a form."""


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

        if once or target.score is not None:
            weight, logits = compute()
        else:
            weight, logits = self.run("gradient", self._gradient_function, target_tensors(inputs, target), compute)
        return weight, logits

    def run(
        self, name: str, prepare: Prepare, inputs: list[Tensor], compute: Compute, *, beside: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the results of one kind of pass, by the fastest form there is; see ``Captures.run``."""
        return self.captures.run(name, prepare, inputs, compute, beside=beside)

    def logits(self, inputs: Tensor) -> Tensor:
        """Compute the model's own logits ``[B, classes]``; a small batch on a GPU does not wait for Python."""

        def compute() -> tuple[Tensor, ...]:
            return (compute_logits(self.recorded_model.model, inputs, autocast=self.recorded_model.autocast),)

        return self.captures.run("forward", self._forward_function, [inputs], compute)[0]

    def _gradient_function(self, inputs: Tensor, kind: PassKind = PassKind.RECORDED) -> BatchFunction:
        """Return a function of images, class indices and weights to W and logits, which reads no values."""
        model, autocast = self.recorded_model.model, self.recorded_model.autocast
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

    def __init__(self, model: nn.Module, rules: RuleSet, autocast: torch.dtype | None = None) -> None:
        super().__init__(model, rules, autocast)
        self._failed: set[str] = set()  # kinds of pass

    def __call__(self, inputs: Tensor, target: Target, *, once: bool = False) -> tuple[Tensor, Tensor]:
        """Compute W ``[B, K, C, H, W]`` and logits ``[B, classes]``; a graph serves few inputs too, padded."""
        return super().__call__(inputs, target)

    def run(
        self, name: str, prepare: Prepare, inputs: list[Tensor], compute: Compute, *, beside: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the results of one kind of pass by its graph."""

        def compile_pass(inputs: list[Tensor]) -> BatchFunction | None:
            return self._compile(name, prepare, inputs)

        function = None if name in self._failed else self._cache.find(compile_pass, inputs, name)
        if function is None:
            return super().run(name, prepare, inputs, compute, beside=beside)
        return self.captures.run_beside(function, inputs) if beside else function(*inputs)

    def _compile(self, name: str, prepare: Prepare, inputs: list[Tensor]) -> BatchFunction | None:
        """Return a graph that has run on these images, class indices and weights."""
        try:
            graph, passes = self._trace(prepare, inputs)
            function = _pad_batch(graph, len(inputs[0]))
            function(*inputs)
        except (DaveError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            self._failed.add(name)
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the model could not be compiled ({first}); it runs without", stacklevel=2)
            return None
        return count_as(capture_cuda_graph(function, inputs) if inputs[0].is_cuda else function, passes)

    def _trace(self, prepare: Prepare, inputs: list[Tensor]) -> tuple[BatchFunction, int]:
        """Return the compiled graph, and how many forward passes of an image it makes."""
        model = self.recorded_model.model
        with count_passes():  # what preparing computes is no pass of a map
            function = prepare(inputs[0], PassKind.TRACED)
        with cache_fingerprints(), isolate_pass(inputs[0]), count_passes() as count:
            state = fingerprint_model(model).state  # a tracer changes what the model's code reads
            graph = trace_graph(function, [part.detach().clone() for part in inputs])
        if fingerprint_model(model).state != state:
            raise RuntimeError("it changes with every pass")
        if any(node.kwargs.get("generator") is not None for node in graph.graph.nodes):  # which nothing would seed anew
            raise RuntimeError("it draws random numbers")
        with torch.no_grad():  # the graph holds its derivatives already
            return compile_graph(graph, inputs), count.passes // len(inputs[0])


def _pad_batch(function: BatchFunction, batch: int) -> BatchFunction:
    """Return a function of ``batch`` rows that takes fewer: the first row is repeated where some are missing."""

    @torch.no_grad()
    def padded(*inputs: Tensor) -> tuple[Tensor, ...]:
        rows = len(inputs[0])
        missing = batch - rows
        full = [torch.cat([part, part[:1].expand(missing, *part.shape[1:])]) if missing else part for part in inputs]
        return tuple(output[:rows] for output in function(*(part.contiguous() for part in full)))

    return padded
