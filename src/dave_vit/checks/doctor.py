"""Whether one model, with its own weights, is explained exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit.checks.companion_values import NotReplayed, replayed
from dave_vit.checks.constants import changing
from dave_vit.checks.float64 import Wide
from dave_vit.engine import gradient
from dave_vit.engine.conservation import Balance
from dave_vit.engine.forward import logits_of
from dave_vit.engine.gradient import Gradient
from dave_vit.engine.rule_sets.effective import EFFECTIVE
from dave_vit.engine.targets import Target
from dave_vit.engine.token_layout import TokenLayout, token_layout
from dave_vit.errors import OutputError
from dave_vit.models.adapter import Adapter
from dave_vit.models.prompted import Prompted
from dave_vit.models.tasks import TaskModel

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
        changing: the function that met a constant which is another one for another image; empty where none did.
        held: what <W, d> leaves over of the score's change between the images x and x + d, with all operators held,
            relative to the score; None where the model cannot be replayed.
    """

    dtype: torch.dtype
    gap: float
    forward: float
    logit: float
    image_part: float
    constants: int
    functions: dict[str, int]
    layout: TokenLayout | str
    changing: str = ""
    held: float | None = None

    @property
    def exact(self) -> bool:
        """Whether maps of this model are exact."""
        return not self.fault

    @property
    def fault(self) -> str:
        """What speaks against it; empty where nothing does."""
        limit = LIMITS[self.dtype]
        if not self.gap < limit:
            return f"{self.gap:.1e} of the logit is unaccounted for"
        if not self.forward < max(1e-6, 10 * torch.finfo(self.dtype).eps):
            return f"the logits change by {self.forward:.1e} under the interception"
        if self.changing:
            return f"what {self.changing} takes for a constant changes with the image"
        if self.held is not None and not self.held < limit:
            return f"with all operators held, {self.held:.1e} of the logit's change is not that of the map"
        return ""

    @property
    def verdict(self) -> str:
        """In plain words."""
        if not self.exact:
            return f"not exact: {self.fault}; please report this model, since it should have been refused"
        share = f"{self.image_part:.4g} of the logit {self.logit:.4g} comes from the image"
        apply = "work as well" if isinstance(self.layout, TokenLayout) else "do not apply to it"
        tokens = f"attention-based methods {apply}"
        return f"good: dave explains this model exactly; {share}, the rest from its constants; {tokens}"


def subject(model: Adapter, picture: Image.Image | None = None, *, seed: int = 0) -> tuple[Adapter, Tensor]:
    """The model with any prompt, where it takes one, and what it is examined on ``[1, C, H, W]``; noise by default."""
    if picture is None:
        picture = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (256, 256, 3), dtype=np.uint8))
    model = model.tried(picture) if isinstance(model, Prompted) else model
    return model, model.preprocess(picture)


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
    wanted = Target.of(score, len(inputs)).resolve(plain)
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
        changing=changing(model, inputs, read),
        held=_held_gap(model, inputs, parts, wanted),
    )


def _held_gap(model: nn.Module, inputs: Tensor, parts: Gradient, wanted: Target) -> float | None:
    shift = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1), dtype=inputs.dtype).to(inputs.device)
    try:
        other = replayed(model, inputs, inputs + shift, wanted.read)
    except NotReplayed:
        return None
    change = float(wanted.rows(other).sum()) - float(parts.score)
    told = float((parts.weight * shift).sum())
    return abs(change - told) / max(abs(float(parts.score)), abs(told), torch.finfo(inputs.dtype).tiny)
