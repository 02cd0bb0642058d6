"""The default must stay better than the one before, on pictures whose truth is known."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from dave_vit import DAVE, load_model
from dave_vit.data import open_dataset
from dave_vit.data.grids import compose_grids
from dave_vit.metrics import energypg, gridpg

PICTURES, SCORED = 4, 2  # as many as a grid has, and of these with masks: 0.12 and 0.11 ahead
SAMPLES = {"default": 14, "threshold": 50}  # half of the default's own, all of the other's


@functools.cache
def pictures() -> tuple[Tensor, Tensor, Tensor]:
    model, data = load_model("builtin"), open_dataset("builtin:single:seen:11", PICTURES)
    inputs = torch.cat([model.preprocess(data.image(number)) for number in range(PICTURES)])
    masks = torch.stack([torch.as_tensor(data.mask(number)) for number in range(PICTURES)])
    return inputs, masks, torch.tensor([data[number].label for number in range(PICTURES)])


def methods() -> list[DAVE]:
    """The default, and the one before it."""
    return [DAVE(load_model("builtin"), samples, preset=name) for name, samples in SAMPLES.items()]


@pytest.mark.slow
class TestDefaultBeatsTheOneBefore:
    def test_energy(self):
        inputs, masks, labels = (part[:SCORED] for part in pictures())
        new, old = (method.explain(inputs, labels).map for method in methods())
        assert energypg(new, masks).nanmean() > energypg(old, masks).nanmean() + 0.05

    def test_grids(self):
        inputs, _, labels = pictures()
        grids, targets = compose_grids(inputs.unflatten(0, (-1, 4))), labels.unflatten(0, (-1, 4))
        new, old = (method.explain(grids, targets).map for method in methods())
        assert gridpg(new).nanmean() > gridpg(old).nanmean() + 0.1
