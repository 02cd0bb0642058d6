"""Check whether one model, with its own weights, is explained exactly: in float64, also where its code casts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dave_vit._internal.torch_private import tree_leaves
from dave_vit.checks.companion_values import ReplayError, replay
from dave_vit.engine import EFFECTIVE, Target, gradient
from dave_vit.engine.dataflow import find_changing_constant
from dave_vit.engine.forward import compute_logits
from dave_vit.engine.gradient import Balance, Gradient
from dave_vit.engine.observation import TokenLayout, find_text_decoder, find_token_layout
from dave_vit.engine.operators import function_name
from dave_vit.engine.states import map_tensors, tensors
from dave_vit.errors import OutputError, UnsupportedOperator
from dave_vit.models.adapter import Adapter
from dave_vit.models.tasks import PromptedModel, TaskModel

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The largest gap that rounding can explain; single precision loses much where large parts cancel."""


@dataclass(frozen=True)
class Diagnosis:
    """Result of checking a model.

    Attributes:
        dtype: the precision of the check.
        gap: the logit minus the image's part and the parts of all additive constants, relative to the logit.
        forward: largest difference between logits with and without interception, relative to the largest logit.
        logit: of the predicted class.
        image_part: <W, x>, the image's contribution to the logit.
        constants: number of additive constants (biases, positions, tokens) that contribute the rest.
        functions: how often each function was called with a tensor that depends on the input.
        layout: the token layout, or the reason why there is no single grid.
        changing_constant: the function that received a constant which differs for another image; empty if none did.
        replay_gap: change of the score between the images x and x + d with all operators held fixed, minus <W, d>,
            relative to the score; None where the model cannot be replayed.
        writes: whether the model writes text.
    """

    dtype: torch.dtype
    gap: float
    forward: float
    logit: float
    image_part: float
    constants: int
    functions: dict[str, int]
    layout: TokenLayout | str
    changing_constant: str = ""
    replay_gap: float | None = None
    writes: bool = False

    @property
    def exact(self) -> bool:
        """Whether maps of this model are exact."""
        return not self.fault

    @property
    def fault(self) -> str:
        """The first failed condition; empty where the model is exact."""
        limit = LIMITS[self.dtype]
        if not self.gap < limit:
            return f"{self.gap:.1e} of the logit is unaccounted for"
        if not self.forward < max(1e-6, 10 * torch.finfo(self.dtype).eps):
            return f"the logits change by {self.forward:.1e} under the interception"
        if self.changing_constant:
            return f"what {self.changing_constant} takes for a constant changes with the image"
        if self.replay_gap is not None and not self.replay_gap < limit:
            return f"with all operators held fixed, {self.replay_gap:.1e} of the logit's change is not that of the map"
        return ""

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if not self.exact:
            return self.summary
        if self.image_part == 0.0:
            return (
                f"nothing to explain: the image contributes 0 to the logit {self.logit:.4g}, as with a head of zeros; "
                "load trained weights"
            )
        share = f"{self.image_part:.4g} of the logit {self.logit:.4g} comes from this image"
        return f"{self.summary}; {share}, the rest from constants"

    @property
    def summary(self) -> str:
        """What holds for every image, in one sentence."""
        if not self.exact:
            return f"not exact: {self.fault}; please report this model, since it should have been refused"
        methods = "rollout and gradcam" if self.writes else "attention-based methods"
        is_grid = isinstance(self.layout, TokenLayout)
        applies = f"{methods} work as well" if is_grid else "attention-based methods do not apply to it"
        return (
            "good: the linear map of this model (preset exact) is exact; the default averages relevance over views "
            f"instead; {applies}"
        )


def example_inputs(model: Adapter, image: Image.Image | None = None, *, seed: int = 0) -> tuple[Adapter, Tensor]:
    """Return a model, with an example prompt where it takes one, and an input ``[1, C, H, W]``; noise by default."""
    if image is None:
        image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (256, 256, 3), dtype=np.uint8))
    model = model.with_example_prompt(image) if isinstance(model, PromptedModel) else model
    return model, model.preprocess(image)


def diagnose(model: Adapter, inputs: Tensor) -> Diagnosis:
    """Check a model on one input ``[1, C, H, W]``, in float64 where possible; its weights are restored afterwards.

    Raises:
        UnsupportedOperator: a function of the model has no exact rule, or a tensor bypasses the rules.
    """
    try:
        with _cast(model, torch.float64), Float64Mode():
            return _diagnose(model, inputs.double())
    except RuntimeError as error:
        if "dtype" not in str(error) and "scalar type" not in str(error):
            raise
    with _cast(model, torch.float32):  # some models hold tensors that .double() does not reach
        return _diagnose(model, inputs.float())


@contextmanager
def _cast(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
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


def _diagnose(model: Adapter, inputs: Tensor) -> Diagnosis:
    score = model.task.check_score if isinstance(model, TaskModel) else None
    read = Target(score=score).read
    plain = compute_logits(model, inputs, read)
    result = gradient(model, inputs, score, rules=EFFECTIVE, record_constants=True)
    balance = Balance.of(result, inputs)
    target = Target.of(score, len(inputs)).resolve(plain)
    try:
        layout: TokenLayout | str = find_token_layout(model, inputs, read)
    except (OutputError, UnsupportedOperator) as error:
        layout = str(error)
    return Diagnosis(
        inputs.dtype,
        gap=balance.gap,
        forward=float((result.logits - plain).abs().max() / plain.abs().max().clamp_min(torch.finfo(plain.dtype).tiny)),
        logit=balance.score,
        image_part=balance.explained,
        constants=len(result.constants),
        functions=result.functions,
        layout=layout,
        changing_constant=find_changing_constant(model, inputs, read),
        replay_gap=_replay_gap(model, inputs, result, target),
        writes=find_text_decoder(model) is not None,
    )


def _replay_gap(model: nn.Module, inputs: Tensor, result: Gradient, target: Target) -> float | None:
    shift = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1), dtype=inputs.dtype).to(inputs.device)
    try:
        logits = replay(model, inputs, inputs + shift, target.read)
    except ReplayError:
        return None
    change = float(target.scores(logits).sum()) - float(result.score)
    predicted = float((result.weight[:, 0] * shift).sum())
    return abs(change - predicted) / max(abs(float(result.score)), abs(predicted), torch.finfo(inputs.dtype).tiny)


# Functions that make floating tensors, and those that make them of floating numbers.
_FACTORIES = frozenset(
    """bartlett_window blackman_window empty empty_permuted empty_strided eye fft_fftfreq fft_rfftfreq hamming_window
    hann_window kaiser_window linspace logspace normal ones rand randn zeros""".split()
)
_CONVERSIONS = frozenset("arange as_tensor asarray full range scalar_tensor tensor".split())


class Float64Mode(TorchFunctionMode):
    """Context in which float64 tensors stay float64.

    Language models compute norms and attention in float32 whatever their dtype; that rounding would hide the residual
    of an identity checked in float64. New tensors are float64 too unless a dtype is given. The default dtype of torch
    is left alone: it belongs to all threads.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call with float64 instead of float32."""
        if func.__name__ == "__get__":  # most calls read an attribute
            return func(*args)
        kwargs, name = kwargs or {}, function_name(func).name
        given = tensors((args, kwargs))
        if not given:
            is_of_floats = name in _CONVERSIONS and any(isinstance(one, float) for one in tree_leaves((args, kwargs)))
            is_new = kwargs.get("dtype") is None and (name in _FACTORIES or is_of_floats)
            return func(*args, **({**kwargs, "dtype": torch.float64} if is_new else kwargs))
        has_float64 = any(tensor.dtype == torch.float64 for tensor in given)
        if name == "scaled_dot_product_attention" and has_float64:
            args, kwargs = map_tensors(lambda t: t.to(_to_float64(t.dtype)), (args, kwargs))  # AttentionArguments.bind
        if name == "float" and (has_float64 or not args[0].is_floating_point()):
            return args[0].double()
        if any(value is torch.float32 for value in (*args, *kwargs.values())):
            if has_float64:
                args = tuple(_to_float64(value) for value in args)
                kwargs = {name: _to_float64(value) for name, value in kwargs.items()}
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        is_made_of_integers = not any(tensor.is_floating_point() or tensor.is_complex() for tensor in given)
        if is_made_of_integers and isinstance(result, Tensor) and result.dtype == torch.float32:
            return _run_on_integers(func, name, args, kwargs)
        return result


def _run_on_integers(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a function, such as a quotient, that makes floating numbers of integers, in float64."""
    if name == "where":  # of a mask, and of two numbers
        return func(args[0], *(torch.as_tensor(value, dtype=torch.float64) for value in args[1:]))
    return func(*map_tensors(Tensor.double, args), **map_tensors(Tensor.double, kwargs))


def _to_float64(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value == torch.float32 else value
