"""Whether one model, with its own weights, is explained exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dave_vit.checks.wide import Wide
from dave_vit.conserve import Balance
from dave_vit.errors import OutputError
from dave_vit.models.adapter import Adapter
from dave_vit.models.tasks import TaskModel
from dave_vit.rules import EFFECTIVE
from dave_vit.run import gradient
from dave_vit.run.layout import TokenLayout, token_layout
from dave_vit.run.passes import logits_of
from dave_vit.targets import Target

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The largest gap that rounding can explain; single precision loses much where large parts cancel."""


@dataclass(frozen=True)
class Diagnosis:
    """What an examination says of a model.

    Attributes:
        dtype: the type it was done in.
        gap: what is left of the logit without the image's part and the parts of all additive constants, relative to the
            logit.
        forward: largest difference between logits with and without interception, relative to the largest logit.
        logit: of the predicted class.
        image_part: <W, x>, what the image contributes to it.
        constants: how many additive constants (biases, positions, tokens) contribute the rest.
        functions: how often each function met a tensor that carries the input.
        layout: where the tokens lie, or why there is no single grid.
    """

    dtype: torch.dtype
    gap: float
    forward: float
    logit: float
    image_part: float
    constants: int
    functions: dict[str, int]
    layout: TokenLayout | str

    @property
    def exact(self) -> bool:
        """Whether maps of this model are exact."""
        return self.gap < LIMITS[self.dtype] and self.forward < max(1e-6, 10 * torch.finfo(self.dtype).eps)

    @property
    def verdict(self) -> str:
        """In plain words."""
        if not self.exact:
            return (
                f"not exact: {self.gap:.1e} of the logit is unaccounted for; please report this model, since it should "
                "have been refused"
            )
        share = f"{self.image_part:.4g} of the logit {self.logit:.4g} comes from the image"
        apply = "work as well" if isinstance(self.layout, TokenLayout) else "do not apply to it"
        tokens = f"attention-based methods {apply}"
        return f"good: dave explains this model exactly; {share}, the rest from its constants; {tokens}"


def examine(model: Adapter, inputs: Tensor) -> Diagnosis:
    """Check a model on one input ``[1, C, H, W]``, in float64 where it can be; afterwards it is as it was.

    Raises:
        UnsupportedOperator: a function of the model has no exact rule, or something takes a way round the rules.
    """
    try:
        with _in_type(model, torch.float64), Wide():
            return _examined(model, inputs.double())
    except RuntimeError as error:
        if "dtype" not in str(error) and "scalar type" not in str(error):
            raise
    with _in_type(model, torch.float32):  # some models hold tensors that .double() does not reach
        return _examined(model, inputs.float())


@contextmanager
def _in_type(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    model.to(dtype)
    try:
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for current, before in buffers:
            current.update(before)


def _examined(model: Adapter, inputs: Tensor) -> Diagnosis:
    score = model.task.score if isinstance(model, TaskModel) else None
    read = Target(score=score).read
    plain = logits_of(model, inputs, read)
    parts = gradient(model, inputs, score, rules=EFFECTIVE, record_constants=True)
    balance = Balance.of(parts, inputs)
    try:
        layout: TokenLayout | str = token_layout(model, inputs, read)
    except OutputError as error:
        layout = str(error)
    return Diagnosis(
        inputs.dtype,
        gap=balance.gap,
        forward=float((parts.logits - plain).abs().max() / plain.abs().max()),
        logit=balance.score,
        image_part=balance.explained,
        constants=len(parts.constants),
        functions=parts.functions,
        layout=layout,
    )
