"""Check whether an architecture is explained exactly: by the conservation identity, on weights drawn at random."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dave_vit.checks.doctor import Float64Mode
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.forward import compute_logits, forward, isolate_pass
from dave_vit.engine.gradient import compute_balances
from dave_vit.engine.interception import Interception
from dave_vit.engine.rule_sets import EFFECTIVE, RELEVANCE
from dave_vit.engine.soundness import check_soundness
from dave_vit.engine.targets import Target
from dave_vit.errors import MissingExtra, UnsupportedOperator
from dave_vit.methods.dave import DAVE
from model_coverage.entry import Entry

PHOTO = Path(__file__).resolve().parents[3] / "docs" / "photos" / "chelsea.jpg"

LIMIT = 1e-9
"""The largest gap that counts as exact, in float64."""

State = Literal["exact", "unsupported", "not installed", "inexact"]


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        entry: what was checked.
        state: "exact"; "unsupported": refused with UnsupportedOperator; "inexact" would be a fault of this package.
        gap: what the identity leaves unexplained, relative to the image's part of the logit.
        default_gap: the same under the rules that DAVE averages by default, for a photograph.
        is_left_alone: a model that had made no pass before has the outputs and the state that it had before two maps.
        forward: how far logits under the interception are from the model's own in float32, relative to the largest.
        reason: why it is unsupported.
    """

    entry: Entry
    state: State
    gap: float = math.nan
    default_gap: float = math.nan
    forward: float = math.nan
    reason: str = ""
    is_left_alone: bool = True


def check(entry: Entry, *, seed: int = 0) -> Outcome:
    """Build, draw weights and an image, and compare the logit with the sum of its parts.

    Args:
        entry: the architecture.
        seed: of weights and images.
    """
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return _check_model(entry, entry.build().float().eval(), seed)
        except MissingExtra as error:
            return Outcome(entry, "not installed", reason=str(error))


def _check_model(entry: Entry, model: nn.Module, seed: int) -> Outcome:
    draw = torch.Generator().manual_seed(seed)
    images, photo = torch.randn(4, *entry.shape, generator=draw), read_photo(entry)
    randomise(model, draw)
    twin, images64 = copy.deepcopy(model), images.double()  # some models keep tensors of the type they first ran in
    calibrate(model.double(), images64)
    reference = copy.deepcopy(twin)
    calibrate(reference, images)
    twin.load_state_dict(reference.state_dict())
    try:
        gap = unexplained(model, images64, entry, EFFECTIVE)
        default_gap = unexplained(model, torch.cat([photo, images]).double(), entry, RELEVANCE)
        is_whole = bool(run_default(twin, photo, entry).isfinite().all())
        DAVE(twin, samples=2, preset="paper").attribute(photo, entry.score)
        is_left_alone = is_same(twin, reference, photo, entry)
        forward = forward_difference(twin, images, entry)
    except UnsupportedOperator as error:
        return Outcome(entry, "unsupported", reason=str(error))
    is_exact = is_whole and max(gap, default_gap) < LIMIT
    return Outcome(entry, "exact" if is_exact else "inexact", gap, default_gap, forward, "", is_left_alone)


def read_photo(entry: Entry) -> Tensor:
    """Read a photograph as an input of an architecture: ``[1, C, H, W]``, or all frames of a clip."""
    with Image.open(PHOTO) as photo:
        pixels = np.asarray(photo.convert("RGB").resize(entry.size[::-1]), dtype=np.float32)
    image = torch.from_numpy(pixels).permute(2, 0, 1) / 64 - 2  # [3, H, W] in about -2..2
    channels = image[torch.arange(entry.channels) % 3]
    return channels.expand(1, *entry.shape).clone()


def run_default(model: nn.Module, photo: Tensor, entry: Entry) -> Tensor:
    """Compute a map of the photograph by DAVE with its defaults, two views for the sake of time."""
    return DAVE(model, samples=2).attribute(photo, entry.score)


def is_same(model: nn.Module, reference: nn.Module, photo: Tensor, entry: Entry) -> bool:
    """Whether a model has the outputs and the state of another one, and nothing that this package left in it."""
    read, outputs = Target(score=entry.score).read, []
    for each in (model, reference):
        torch.manual_seed(0)
        with torch.no_grad():
            outputs.append(read(each(photo.clone()), len(photo)))
    after, before = outputs
    state = reference.state_dict()
    return (
        type(after) is Tensor
        and torch.equal(after, before)
        and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        and not any("_dave" in name for module in model.modules() for name in vars(module))
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """For models this small, several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def forward_difference(model: nn.Module, images: Tensor, entry: Entry) -> float:
    """How far the logits under the interception are from the model's own, relative to the largest."""
    read = Target(score=entry.score).read
    output = compute_logits(model, images, lambda output, _: output)
    plain, mode = read(output, len(images)), Interception(EFFECTIVE, model)
    with isolate_pass(images):
        intercepted = forward(model, images, mode, None, read)[1].detach()
        check_soundness(model, images, mode.rules, logits=intercepted, score=entry.score)
    logits = getattr(output, "logits", getattr(output, "masks_queries_logits", output))
    return float((intercepted - plain).abs().max() / _largest(plain, logits))


def _largest(*parts: object) -> Tensor:
    """The largest number of the tensors; a score may be one of the smallest logits, rounded as the largest are."""
    return torch.stack([part.abs().max() for part in parts if isinstance(part, Tensor)]).max()


def unexplained(model: nn.Module, images: Tensor, entry: Entry, rules: RuleSet) -> float:
    """Compute the identity's residual for one image of ``[B, C, H, W]``: the first with something to explain.

    A head that ends in a ReLU is zero for some images, and so are all parts of it. ``conservation_gap`` divides by the
    logit or <W, x>, whichever is larger; here it is the image's part <W, x> alone, so that large biases cannot hide an
    error.
    """
    with Float64Mode():
        for image in images.split(1):
            (balance,) = compute_balances(model, image, entry.score, rules=rules)
            if balance.explained or balance.residual:
                return balance.residual / abs(balance.explained) if balance.explained else math.inf
    return math.inf


def randomise(model: nn.Module, draw: torch.Generator) -> None:
    """Draw all parameters such that every path counts: no zero heads, no tiny layer scales, no uniform attention."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 0:  # a temperature
                continue
            normal = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
            uniform = torch.rand(parameter.shape, generator=draw, dtype=parameter.dtype)
            if parameter.ndim == 1:
                parameter.copy_(0.2 * normal if "bias" in name else 0.5 + uniform)
            elif parameter.shape[0] == 1:  # tokens and positions
                parameter.copy_(0.3 * normal)
            else:
                parameter.copy_(normal * (parameter[0].numel() ** -0.5))


def calibrate(model: nn.Module, inputs: Tensor) -> None:
    """Set the statistics of batch normalisation to those of the inputs: deep networks then neither fade nor burst."""
    with _learning(model) as any_layer, torch.no_grad():
        if any_layer:
            model(inputs)


@contextmanager
def _learning(model: nn.Module) -> Iterator[bool]:
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    before = [layer.momentum for layer in layers]
    for layer in layers:
        layer.train()
        layer.momentum = 1.0
    try:
        yield bool(layers)
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.eval()
            layer.momentum = momentum
