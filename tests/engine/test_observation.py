"""Attention is seen whatever way a model spells it, and can be differentiated."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_models
from dave_vit.engine.observation import observe
from dave_vit.errors import OutputError, TrainingModeError

BATCH, TOKENS, DIM, HEADS = 2, 5, 8, 2


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # [B, heads, N, d]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def method(q, k, v):
    return scores(q, k).softmax(-1) @ v


def functional(q, k, v):
    return torch.matmul(F.dropout(F.softmax(scores(q, k), dim=3, dtype=torch.float32).to(q.dtype), 0.1, False), v)


def module(q, k, v):
    return torch.einsum("bhij,bhjd->bhid", nn.Softmax(dim=-1)(scores(q, k)), v)


def flat(q, k, v):  # heads in the batch
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT) / math.sqrt(q.shape[-1]), -1), v).unflatten(0, (-1, HEADS))


class Model(nn.Module):
    """Pixels as tokens, one attention, one class score for each channel."""

    def __init__(self, spelling=None, *, packed: bool = False, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spelling, self.packed, self.batch_first = spelling, packed, batch_first
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:  # [B, DIM, N, 1]
        tokens = x.flatten(2).mT
        if self.packed:
            tokens = tokens if self.batch_first else tokens.transpose(0, 1)
            out = self.attn(tokens, tokens, tokens, need_weights=False)[0]
            return out[:, 0] if self.batch_first else out[0]
        q, k, v = map(split_heads, F.linear(tokens, self.attn.in_proj_weight, self.attn.in_proj_bias).chunk(3, -1))
        return self.attn.out_proj(self.spelling(q, k, v).transpose(1, 2).flatten(2))[:, 0]


SPELLINGS = {
    **{spelling.__name__: Model(spelling).eval() for spelling in (fused, method, functional, module, flat)},
    "packed": Model(packed=True).eval(),
    "packed, sequence first": Model(packed=True, batch_first=False).eval(),
}
X = torch.randn(BATCH, DIM, TOKENS, 1, generator=torch.Generator().manual_seed(1))


def reference() -> tuple[Tensor, Tensor, Tensor]:
    """Attention, its gradient and the logits, in plain torch."""
    model = SPELLINGS["method"]
    tokens = X.flatten(2).mT
    projected = F.linear(tokens, model.attn.in_proj_weight, model.attn.in_proj_bias).chunk(3, -1)
    q, k, v = map(split_heads, projected)
    matrix = scores(q, k).softmax(-1)
    logits = model.attn.out_proj((matrix @ v).transpose(1, 2).flatten(2))[:, 0]
    return matrix.detach(), torch.autograd.grad(logits[:, 3].sum(), matrix)[0], logits.detach()


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_shows_the_same_matrix_and_gradient(name):
    matrix, gradient, logits = reference()
    with observe(SPELLINGS[name], X) as seen:
        (attention,) = seen.attention
        (actual,) = torch.autograd.grad(seen.logits[:, 3].sum(), attention.matrix)
    torch.testing.assert_close(attention.matrix.detach(), matrix)
    torch.testing.assert_close(actual, gradient)
    torch.testing.assert_close(seen.logits.detach(), logits)
    torch.testing.assert_close(attention.tokens.detach(), X.flatten(2).mT)


def test_masks_causality_and_shared_heads():
    class Masked(nn.Module):
        def __init__(self, **options) -> None:
            super().__init__()
            self.options = options

        def forward(self, x: Tensor) -> Tensor:
            q = split_heads(x.flatten(2).mT)
            k = q[:, :1] if self.options.get("enable_gqa") else q
            return F.scaled_dot_product_attention(q, k, k, **self.options).flatten(1)

    allowed = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.4
    allowed.fill_diagonal_(True)
    for options, zero in (
        ({"attn_mask": allowed}, ~allowed),
        ({"attn_mask": torch.zeros(TOKENS, TOKENS).masked_fill(~allowed, -math.inf)}, ~allowed),
        ({"is_causal": True}, torch.ones(TOKENS, TOKENS).triu(1).bool()),
        ({"enable_gqa": True, "scale": 0.3}, torch.zeros(TOKENS, TOKENS, dtype=torch.bool)),
    ):
        model = Masked(**options)
        with observe(model, X) as seen:
            matrix = seen.attention[0].matrix.detach()
        assert torch.equal(matrix == 0, zero.expand_as(matrix))
        torch.testing.assert_close(matrix.sum(-1), torch.ones(BATCH, HEADS, TOKENS))
        torch.testing.assert_close(seen.logits.detach(), model(X))


def test_softmax_that_is_no_attention_is_not_taken_for_it():
    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x.softmax(1) * x).mean((2, 3)).softmax(-1) + 1).log()

    with observe(Gated(), X) as seen:
        assert seen.attention == []


@pytest.mark.parametrize("family", ["vit", "torchvision"])
def test_modules_are_named_and_grids_are_noted(family):
    model, images = tiny_models.FAMILIES[family](), tiny_models.images()
    with observe(model, images) as seen:
        assert len(seen.attention) == 2
        for actual in seen.attention:
            assert isinstance(model.get_submodule(actual.module), nn.Module)
            assert actual.matrix.shape == (3, 3, 17, 17)
            assert actual.tokens.shape == (3, 17, 24)
    assert seen.maps == [(4, 4)]
    assert seen.attention[0].module != seen.attention[1].module


def test_pooled_features_have_channels_second():
    images = tiny_models.images()
    for model, shape in (
        (tiny_models.relu_cnn(), (3, 8, 14, 14)),
        (tiny_models.swin(), (3, 24, 4, 4)),
        (tiny_models.vit(global_pool="avg", class_token=False), (3, 24, 16)),
    ):
        with observe(model, images) as seen:
            assert seen.pooled.shape == shape
            (grad,) = torch.autograd.grad(seen.logits.sum(), seen.pooled)
        assert grad.abs().sum() > 0


def test_nothing_is_recorded_on_parameters_and_errors_pass_through():
    model = tiny_models.vit()
    with observe(model, tiny_models.images()) as seen:
        torch.autograd.grad(seen.logits.sum(), [actual.matrix for actual in seen.attention])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.is_inference_mode_enabled()
    with pytest.raises(TrainingModeError), observe(tiny_models.vit(attn_drop_rate=0.1).train(), X):
        pass
    with pytest.raises(OutputError), observe(nn.Identity(), tiny_models.images()):
        pass
