"""Forward and backward pass as one compiled graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dave_vit.errors import DaveError
from dave_vit.intercept.calls import RuleSet
from dave_vit.intercept.mode import Interception
from dave_vit.run.gradient import derivatives
from dave_vit.run.lean import LeanModel
from dave_vit.run.passes import forward, ready, undisturbed
from dave_vit.run.sound import check_sound, fingerprint

_Step = Callable[[Tensor, Tensor], Tensor]


class CompiledGradient:
    """``effective_transformation`` for batches of one size, traced once and compiled.

    The interception runs while tracing only: the graph holds plain tensor operations, in which the rules' derivatives
    are written out. Smaller batches are filled up, so that one graph serves all; it is
    traced anew when the model has changed. Where compiling fails the passes run
    as they are, and a warning says so once.

    Args:
        model: any module that maps inputs to logits; its lean form is traced.
        rules: the derivatives in force.
        autocast: run the model under autocast with this type.
    """

    def __init__(self, model: nn.Module, rules: RuleSet, autocast: torch.dtype | None = None) -> None:
        self.lean = LeanModel(model, autocast)
        self.rules = rules
        self._steps: dict[tuple[object, ...], tuple[int, _Step]] = {}
        self._failed = False
        self._state = 0  # of the model when the graphs were traced

    def __call__(self, inputs: Tensor, target: Tensor) -> Tensor:
        """W for inputs ``[B, C, H, W]`` and class indices ``[B, K]``: ``[B, K, C, H, W]``."""
        if (state := fingerprint(self.lean.model)) != self._state:  # a graph holds the model as it was
            self._steps, self._state = {}, state
        key = (*inputs.shape[1:], inputs.dtype, inputs.device, target.shape[1])
        batch, step = self._steps.get(key, (0, None))
        if not self._failed and (step is None or len(inputs) > batch):
            batch, step = len(inputs), self._compiled(inputs, target)
            if step is not None:
                self._steps[key] = (batch, step)
        if self._failed or step is None:
            return self._plain(inputs, target)
        missing = batch - len(inputs)
        if missing:
            inputs = torch.cat([inputs, inputs[:1].expand(missing, *inputs.shape[1:])])
            target = torch.cat([target, target[:1].expand(missing, -1)])
        with torch.no_grad():  # the graph holds its derivatives already
            return step(inputs.contiguous(), target.contiguous())[: batch - missing]

    def _compiled(self, inputs: Tensor, target: Tensor) -> _Step | None:
        """A graph that was seen working on these inputs."""
        try:
            step = self._trace(inputs, target)
            with torch.no_grad():
                step(inputs.contiguous(), target.contiguous())
            return step
        except (DaveError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._failed = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the model could not be compiled ({first}); it runs without", stacklevel=2)
            return None

    def _trace(self, inputs: Tensor, target: Tensor) -> _Step:
        model, autocast = ready(self.lean.model), self.lean.autocast
        check_sound(model, inputs, self.rules, autocast)
        run = self.lean.of(inputs)

        def step(images: Tensor, wanted: Tensor) -> Tensor:
            mode = Interception(self.rules, model, traced=True)
            leaf, logits = forward(run, images, mode, autocast)
            rows = logits.gather(1, wanted).T  # [K, B]
            return torch.stack([weight for (weight,) in derivatives(rows, [leaf])], 1)

        with undisturbed(inputs):
            graph = make_fx(step)(inputs.detach().clone(), target.clone())
        return torch.compile(graph)  # type: ignore[no-any-return]

    def _plain(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.lean.gradient(inputs, target, self.rules).weight
