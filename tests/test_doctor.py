"""What doctor says of a model is what the methods then do, and the model is as it was."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn

from dave_vit import create_method
from dave_vit.checks.doctor import examine
from dave_vit.errors import UnsupportedOperator
from dave_vit.run.layout import TokenLayout
from tiny_models import drawn, images, relu_cnn, vit


def cait() -> nn.Module:
    """Class attention after the blocks: other matrices than those of the tokens."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return drawn(timm.models.Cait(depth_token_only=2, **shape))


@pytest.mark.parametrize("model", [vit, relu_cnn, cait])
def test_the_model_is_as_it_was(model):
    examined = model()
    before, tensors = copy.deepcopy(examined.state_dict()), [*examined.parameters(), *examined.buffers()]
    assert examine(examined, images(1)).dtype == torch.float64
    assert {p.dtype for p in examined.parameters()} == {torch.float32}
    assert all(now is then for now, then in zip([*examined.parameters(), *examined.buffers()], tensors, strict=True))
    for name, value in examined.state_dict().items():
        assert torch.equal(value, before[name])


def test_also_after_a_refusal():
    model = nn.Sequential(vit(), nn.Softplus())
    with pytest.raises(UnsupportedOperator):
        examine(model, images(1))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("model", [vit, relu_cnn, cait])
def test_attention_based_methods_work_where_it_says_so(model):
    diagnosis = examine(model(), images(1))
    assert diagnosis.exact
    rollout = create_method("rollout", model())
    if isinstance(diagnosis.layout, TokenLayout):
        assert "attention-based methods work" in diagnosis.verdict
        rollout.attribute(images(1), 0)
    else:
        assert "do not apply" in diagnosis.verdict
        with pytest.raises(UnsupportedOperator):
            rollout.attribute(images(1), 0)


def test_an_operator_that_passes_for_a_constant_is_found():
    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = vit()

        def forward(self, x):
            buffer = torch.zeros_like(x)
            buffer.data.copy_(x.detach().exp())  # the identity holds all the same
            return self.model(x + buffer)

    with pytest.raises(UnsupportedOperator, match="constant"):
        examine(Leaks(), images(1))


@pytest.mark.parametrize("name", ["rollout", "legrad", "effective", "attn_lrp"])
def test_inference_tensors(name):
    expected, model = create_method(name, vit()).attribute(images(1), 0), vit()
    with torch.inference_mode():
        torch.testing.assert_close(create_method(name, model).attribute(images(1).clone(), 0), expected)
