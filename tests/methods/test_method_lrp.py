"""Relevance propagation against its rules written out, and rectifiers against theirs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_models
from dave_vit import create_method
from dave_vit.errors import OptionError, UnsupportedOperator

NO_GAMMA = {"conv_gamma": 0.0, "linear_gamma": 0.0, "attention_gamma": 0.0}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gamma_relevance(x: Tensor, weight: Tensor, bias: Tensor, relevance: Tensor, gamma: float) -> Tensor:
    """R_j = sum_k R_k z_jk / sum_j z_jk, where contributions of the sign of z_k count 1 + gamma times; by loops."""
    result = torch.zeros_like(x)
    for k in range(len(bias)):
        parts = [x[j] * weight[k, j] for j in range(len(x))]
        sign = torch.sign(sum(parts) + bias[k])
        raised = [part * (1 + gamma if part * sign > 0 else 1) for part in parts]
        total = sum(raised) + bias[k] * (1 + gamma if bias[k] * sign > 0 else 1)
        for j, part in enumerate(raised):
            result[j] += part / total * relevance[k]
    return result


class TestGamma:
    @pytest.mark.parametrize("gamma", [0.0, 0.25, 100.0])
    def test_two_linear_layers(self, gamma):
        first, second = nn.Linear(12, 7).double(), nn.Linear(7, 3).double()
        model = nn.Sequential(nn.Flatten(), first, second)
        x = normal(1, 3, 2, 2)
        hidden = first(x.flatten(1))[0].detach()
        logits = second(hidden).detach()
        seed = torch.zeros(3, dtype=torch.float64)
        seed[1] = logits[1]
        inner = gamma_relevance(hidden, second.weight.detach(), second.bias.detach(), seed, gamma)
        expected = gamma_relevance(x.flatten(), first.weight.detach(), first.bias.detach(), inner, gamma)
        found = create_method("cp_lrp", model, linear_gamma=gamma).attribute(x, 1)
        torch.testing.assert_close(found.flatten(), expected)

    def test_a_convolution_is_a_linear_layer(self):
        conv = nn.Conv2d(3, 4, 4).double()  # the whole image
        linear = nn.Linear(48, 4).double()
        linear.load_state_dict({"weight": conv.weight.flatten(1), "bias": conv.bias})
        x = normal(2, 3, 4, 4)
        as_conv = create_method("cp_lrp", nn.Sequential(conv, nn.Flatten()), conv_gamma=0.3, linear_gamma=9.0)
        as_linear = create_method("cp_lrp", nn.Sequential(nn.Flatten(), linear), conv_gamma=9.0, linear_gamma=0.3)
        torch.testing.assert_close(as_conv.attribute(x, 2), as_linear.attribute(x, 2))

    def test_relevance_is_conserved_without_biases(self):
        layers = [nn.Linear(48, 9, bias=False), nn.GELU(), nn.Linear(9, 3, bias=False)]
        model = nn.Sequential(nn.Flatten(), *layers).double()
        x = normal(2, 3, 4, 4)
        found = create_method("cp_lrp", model, linear_gamma=0.5).attribute(x, 1)
        torch.testing.assert_close(found.flatten(1).sum(1), model(x)[:, 1])

    def test_attention_has_its_own(self):
        model, x = tiny_models.vit(), tiny_models.images(1)
        gammas = [NO_GAMMA, NO_GAMMA | {"linear_gamma": 0.1}, NO_GAMMA | {"attention_gamma": 0.1}]
        plain, outside, inside = (create_method("cp_lrp", model, **gamma).attribute(x, 1) for gamma in gammas)
        assert not torch.allclose(plain, outside, rtol=1e-3)
        assert not torch.allclose(plain, inside, rtol=1e-3)
        for block in model.blocks:
            block.attn = Skipped()
        with_identity = [create_method("cp_lrp", model, **gamma).attribute(x, 1) for gamma in (gammas[0], gammas[2])]
        assert torch.equal(*with_identity)  # nothing left that attention_gamma could act on

    @pytest.mark.parametrize("name", ["conv_gamma", "linear_gamma", "attention_gamma"])
    def test_negative_gamma_is_refused(self, name):
        with pytest.raises(OptionError, match="-1"):
            create_method("cp_lrp", nn.Flatten(), **{name: -1})


class Skipped(nn.Module):
    def forward(self, x: Tensor, **options) -> Tensor:
        return x


class OneHead(nn.Module):
    """softmax(Q K^T) V read out by a linear head."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.query, self.key, self.value = (nn.Linear(6, 4) for _ in range(3))
        self.head = nn.Linear(20, 3)

    def parts(self, x: Tensor) -> list[Tensor]:
        tokens = x.flatten(2).flatten(1).unflatten(1, (5, 6))  # [B, 5, 6]
        return [layer(tokens) for layer in (self.query, self.key, self.value)]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.spelling == "fused":
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        if self.spelling == "baddbmm":
            mask = torch.zeros(len(q), 5, 5, dtype=q.dtype)
            return torch.bmm(torch.baddbmm(mask, q, k.mT, alpha=0.5).softmax(-1), v)
        if self.spelling == "einsum":
            return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q / 2, k).softmax(-1), v)
        return (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixed(*self.parts(x)).flatten(1))


class TestAttention:
    @pytest.mark.parametrize("spelling", ["fused", "matmul", "einsum", "baddbmm"])
    def test_queries_and_keys_take_a_quarter_values_a_half(self, spelling):
        torch.manual_seed(0)
        model = OneHead(spelling).double()
        x = normal(2, 1, 5, 6).requires_grad_()
        parts = [part.detach().requires_grad_() for part in model.parts(x)]
        score = model.head(model.mixed(*parts).flatten(1))[:, 1].sum()
        slopes = torch.autograd.grad(score, parts)
        shares = [slope * share for slope, share in zip(slopes, (0.25, 0.25, 0.5), strict=True)]
        expected = torch.autograd.grad(model.parts(x), x, shares)[0] * x
        found = create_method("attn_lrp", model, **NO_GAMMA).attribute(x.detach(), 1)
        torch.testing.assert_close(found, expected.detach())

    @pytest.mark.parametrize("name", ["attn_lrp", "cp_lrp"])
    def test_fused_and_eager_attention_agree(self, name):
        model, x = tiny_models.vit(), tiny_models.images(1)
        fused = create_method(name, model).attribute(x, 1)
        for block in model.blocks:
            block.attn.fused_attn = not block.attn.fused_attn
        torch.testing.assert_close(create_method(name, model).attribute(x, 1), fused, rtol=1e-3, atol=1e-6)

    def test_cp_without_gamma_is_the_effective_transformation(self):
        model, x = tiny_models.vit(), tiny_models.images(2)
        expected = create_method("effective", model).attribute(x, 1)
        torch.testing.assert_close(create_method("cp_lrp", model, **NO_GAMMA).attribute(x, 1), expected)

    def test_unknown_functions_are_refused(self):
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.Softplus())
        with pytest.raises(UnsupportedOperator, match="softplus"):
            create_method("attn_lrp", model).attribute(normal(1, 3, 4, 4).float(), 0)


class TestRectifiers:
    @pytest.mark.parametrize("act", [F.relu, F.gelu, F.silu, lambda x: x.clone().relu_()])
    def test_both_rules(self, act):
        first, second = normal(8, 12), normal(3, 8, seed=1)
        x = normal(1, 3, 2, 2)
        x[0, 0, 0, 0] = 0.0
        hidden = x.flatten() @ first.T
        gate = act(hidden) / hidden
        rise = second[1].clamp(min=0)
        for name, slope in (("guided_backprop", gate * rise), ("deconvolution", rise)):
            found = create_method(name, Layers(first, act, second)).attribute(x, 1)
            torch.testing.assert_close(found.flatten(), slope @ first)

    def test_at_zero_the_gate_is_its_limit(self):
        x = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
        identity = torch.eye(2, dtype=torch.float64)
        for act, limit in ((F.relu, 0.0), (F.gelu, 0.5), (F.elu, 1.0)):
            found = create_method("guided_backprop", Layers(identity, act, identity)).attribute(x, 1)
            torch.testing.assert_close(found.flatten(), limit * identity[1], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", ["guided_backprop", "deconvolution"])
    def test_a_model_without_rectifiers_is_refused(self, name):
        with pytest.raises(UnsupportedOperator, match="no rectifier"):
            create_method(name, nn.Sequential(nn.Flatten(), nn.Linear(48, 3))).attribute(normal(1, 3, 4, 4).float(), 0)


class Layers(nn.Module):
    def __init__(self, first: Tensor, act, second: Tensor) -> None:
        super().__init__()
        self.first, self.act, self.second = first, act, second

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x.flatten(1) @ self.first.T) @ self.second.T
