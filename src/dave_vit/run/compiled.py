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
from dave_vit.run.passes import forward, note_pass, ready, undisturbed
from dave_vit.run.sound import check_sound
from dave_vit.run.survey import survey
from dave_vit.targets import Target
from dave_vit.targets.target import contrasted

_Step = Callable[..., tuple[Tensor, Tensor]]


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

    def __call__(self, inputs: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """W ``[B, K, C, H, W]`` and logits ``[B, classes]`` for inputs ``[B, C, H, W]`` and a resolved target."""
        if (state := survey(self.lean.model).numbers) != self._state:  # a graph holds the model as it was
            self._steps, self._state = {}, state
        given = [inputs, target.columns, *([] if target.weights is None else [target.weights])]
        key = (*inputs.shape[1:], inputs.dtype, inputs.device, *(part.shape[1:] for part in given[1:]))
        batch, step = self._steps.get(key, (0, None))
        if not self._failed and (step is None or len(inputs) > batch):
            batch, step = len(inputs), self._compiled(given)
            if step is not None:
                self._steps[key] = (batch, step)
        if self._failed or step is None:
            return self._plain(inputs, target)
        note_pass(inputs)
        given = [_filled(part, batch).contiguous() for part in given]
        with torch.no_grad():  # the graph holds its derivatives already
            weight, logits = step(*given)
        return weight[: len(inputs)], logits[: len(inputs)]

    def _compiled(self, given: list[Tensor]) -> _Step | None:
        """A graph that was seen working on these inputs, classes and weights."""
        try:
            step = self._trace(given)
            with torch.no_grad():
                step(*(part.contiguous() for part in given))
            return step
        except (DaveError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._failed = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the model could not be compiled ({first}); it runs without", stacklevel=2)
            return None

    def _trace(self, given: list[Tensor]) -> _Step:
        model, autocast = ready(self.lean.model), self.lean.autocast
        check_sound(model, given[0], self.rules, autocast)
        run = self.lean.of(given[0])

        def step(images: Tensor, columns: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            mode = Interception(self.rules, model, traced=True)
            leaf, logits = forward(run, images, mode, autocast)
            rows = contrasted(logits, columns, *weights).T  # [K, B]
            return torch.stack([weight for (weight,) in derivatives(rows, [leaf])], 1), logits.detach()

        with undisturbed(given[0]):
            graph = make_fx(step)(*(part.detach().clone() for part in given))
        return torch.compile(graph)  # type: ignore[no-any-return]

    def _plain(self, inputs: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        made = self.lean.gradient(inputs, target, self.rules)
        return made.weight if target.several else made.weight.unsqueeze(1), made.logits


def _filled(part: Tensor, batch: int) -> Tensor:
    """As many rows as the graph was made for: the first one again and again where some are missing."""
    missing = batch - len(part)
    return torch.cat([part, part[:1].expand(missing, *part.shape[1:])]) if missing else part
