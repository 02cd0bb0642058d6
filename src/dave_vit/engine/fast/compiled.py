"""Forward and backward pass as one compiled graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.fast.cuda_graph import Step, replayed
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.fingerprint import fingerprint_model
from dave_vit.engine.forward import autocast_context, compute_logits, forward, isolate_pass, prepare_model, record_pass
from dave_vit.engine.gradient import derivatives
from dave_vit.engine.interception import Interception
from dave_vit.engine.soundness import check_soundness
from dave_vit.engine.targets import Target, contrast_scores
from dave_vit.errors import DaveError


class CompiledGradient:
    """``effective_transformation`` for batches of one size, traced once and compiled.

    The interception runs while tracing only: the graph holds plain tensor operations, in which the rules' derivatives
    are written out. Batches that are a little smaller are filled up, so that one graph serves them too; it is traced
    anew when the model has changed. Where compiling fails the passes run as they are, and a warning says so once.

    Args:
        model: any module that maps inputs to logits; its lean form is traced.
        rules: the derivatives in force.
        autocast: run the model under autocast with this type.
    """

    def __init__(self, model: nn.Module, rules: RuleSet, autocast: torch.dtype | None = None) -> None:
        self.lean = RecordedModel(model, autocast)
        self.rules = rules
        self._steps: dict[tuple[object, ...], dict[int, Step]] = {}  # by form, and by rows
        self._failed = False
        self._state = 0  # of the model when the graphs were traced

    def __call__(self, inputs: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """W ``[B, K, C, H, W]`` and logits ``[B, classes]`` for inputs ``[B, C, H, W]`` and a resolved target."""
        given = [inputs, target.class_indices, *([] if target.weights is None else [target.weights])]
        step = self._step(self._compiled, given)
        if step is None:
            return self._plain(inputs, target)
        record_pass(inputs)
        weight, logits = step(*given)
        return weight, logits

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's logits as ``compute_logits`` gives them; a small batch on a GPU does not wait for Python."""
        step = self._step(self._forward, [inputs]) if inputs.is_cuda else None
        if step is None:
            return compute_logits(self.lean.model, inputs, autocast=self.lean.autocast)
        record_pass(inputs)
        return step(inputs)[0]

    def _step(self, make: Callable[[list[Tensor]], Step | None], given: list[Tensor]) -> Step | None:
        """What ``make`` made for inputs of this form and as many rows, or less than twice as many."""
        if (state := fingerprint_model(self.lean.model).numbers) != self._state:  # a graph holds the model as it was
            self._steps, self._state = {}, state
        key, rows = (make.__name__, given[0].dtype, given[0].device, *(part.shape[1:] for part in given)), len(given[0])
        known = self._steps.setdefault(key, {})
        size = min((size for size in known if rows <= size < 2 * rows), default=rows)
        if size not in known:
            step = make([part.contiguous() for part in given])
            if step is None:
                return None
            known[size] = step
        return known[size]

    def _compiled(self, given: list[Tensor]) -> Step | None:
        """A graph that was seen working on these inputs, classes and weights."""
        if self._failed:
            return None
        try:
            step = _filling(self._trace(given), len(given[0]))
            step(*given)
        except (DaveError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._failed = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the model could not be compiled ({first}); it runs without", stacklevel=2)
            return None
        return replayed(step, given)

    def _trace(self, given: list[Tensor]) -> Step:
        model, autocast = prepare_model(self.lean.model), self.lean.autocast
        check_soundness(model, given[0], self.rules, autocast)
        run = self.lean.of(given[0])

        def step(images: Tensor, columns: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            mode = Interception(self.rules, model, traced=True)
            leaf, logits = forward(run, images, mode, autocast)
            scores = contrast_scores(logits, columns, *weights)  # [B, K]
            return torch.stack([weight for (weight,) in derivatives(scores, [leaf])], 1), logits.detach()

        with isolate_pass(given[0]):
            graph = make_fx(step)(*(part.detach().clone() for part in given))
        with torch.no_grad():  # the graph holds its derivatives already
            fold(graph)
            return inductor(graph, given)

    def _forward(self, given: list[Tensor]) -> Step | None:
        """The forward pass alone, which needs no compiler to be one launch."""
        run, autocast = self.lean.of(given[0]), self.lean.autocast
        if run is self.lean.model:
            return None  # it may look at values, or change

        def step(images: Tensor) -> tuple[Tensor]:
            with torch.no_grad(), autocast_context(images, autocast):
                return (run(images),)

        return replayed(step, given)

    def _plain(self, inputs: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        made = self.lean.gradient(inputs, target, self.rules)
        return made.weight, made.logits


def fold(graph: torch.fx.GraphModule) -> None:
    """Computes now, and not in every pass, what follows from the model's own numbers alone.

    That is weights in the type of autocast, and what rules take of them. Weights that are only looked at in another
    way, such as turned, stay the model's own, and what is written into later is computed every time.
    """
    known: dict[torch.fx.Node, Tensor] = {}
    for node in graph.graph.nodes:
        value = getattr(graph, node.target, None) if node.op == "get_attr" else _known(node, known)
        if isinstance(value, Tensor):
            known[node] = value
    kept = {_place(value) for node, value in known.items() if node.op == "get_attr"}
    kept |= {
        _place(known[one])
        for node in graph.graph.nodes
        if _writes(node)
        for one in node.all_input_nodes
        if one in known
    }
    for number, (node, value) in enumerate(known.items()):
        if _place(value) not in kept and any(user not in known for user in node.users):
            graph.register_buffer(f"_folded{number}", value)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(f"_folded{number}"))
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _known(node: torch.fx.Node, known: dict[torch.fx.Node, Tensor]) -> Any:
    """What a function of known numbers alone returns; None for all others."""
    run, given = node.target, node.all_input_nodes
    if not isinstance(run, torch._ops.OpOverload) or not given or any(one not in known for one in given):
        return None
    if _writes(node) or torch.Tag.nondeterministic_seeded in run.tags:
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda one: known[one])  # type: ignore[no-untyped-call]
    return run(*args, **kwargs)


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def inductor(graph: torch.fx.GraphModule, given: list[Tensor]) -> Step:
    """A graph of torch's own operators, compiled whole: what looks for graphs in Python code would only cut it up."""
    from torch import _inductor  # takes seconds to import

    # A residual stream is written down wherever a term is added to it, rather than added up again by all that read it.
    return _inductor.compile(graph, [*given], options={"realize_reads_threshold": 1})  # type: ignore[no-any-return]


def _filling(step: Step, batch: int) -> Step:
    """A step for so many rows that takes fewer: the first one again and again where some are missing."""

    @torch.no_grad()
    def filled(*given: Tensor) -> tuple[Tensor, ...]:
        rows = len(given[0])
        missing = batch - rows
        full = [torch.cat([part, part[:1].expand(missing, *part.shape[1:])]) if missing else part for part in given]
        return tuple(made[:rows] for made in step(*(part.contiguous() for part in full)))

    return filled
