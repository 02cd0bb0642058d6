"""Forward and backward pass as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dave_vit.intercept.calls import RuleSet
from dave_vit.intercept.mode import Interception
from dave_vit.run.gradient import derivatives, forward, ready, undisturbed

_Step = Callable[[Tensor, Tensor], Tensor]


class CompiledGradient:
    """``effective_transformation`` for batches of one size, traced once and compiled.

    The interception runs while tracing only: the graph holds plain tensor operations, in which the rules' derivatives
    are written out. Smaller batches are filled up, so that one graph serves all.
    """

    def __init__(self, model: nn.Module, rules: RuleSet, autocast: torch.dtype | None = None) -> None:
        self.model = getattr(model, "_orig_mod", model)
        self.rules = rules
        self.autocast = autocast
        self._steps: dict[tuple[object, ...], tuple[int, _Step]] = {}

    def __call__(self, inputs: Tensor, target: Tensor) -> Tensor:
        """W for inputs ``[B, C, H, W]`` and class indices ``[B, K]``: ``[B, K, C, H, W]``."""
        key = (*inputs.shape[1:], inputs.dtype, inputs.device, target.shape[1])
        batch, step = self._steps.get(key, (0, None))
        if step is None or len(inputs) > batch:
            batch, step = len(inputs), self._compile(inputs, target)
            self._steps[key] = (batch, step)
        missing = batch - len(inputs)
        if missing:
            inputs = torch.cat([inputs, inputs[:1].expand(missing, *inputs.shape[1:])])
            target = torch.cat([target, target[:1].expand(missing, -1)])
        return step(inputs.contiguous(), target.contiguous())[: batch - missing]

    def _compile(self, inputs: Tensor, target: Tensor) -> _Step:
        ready(self.model)
        with undisturbed(inputs):
            graph = make_fx(lambda images, wanted: self._step(images, wanted))(inputs.detach().clone(), target.clone())
            return torch.compile(graph)  # type: ignore[no-any-return]

    def _step(self, inputs: Tensor, target: Tensor) -> Tensor:
        leaf, logits = forward(self.model, inputs, Interception(self.rules, self.model), self.autocast)
        rows = logits.gather(1, target).T  # [K, B]
        return torch.stack([weight for (weight,) in derivatives(rows, [leaf])], 1)
