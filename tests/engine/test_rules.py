"""Each rule against a slow reference, in every spelling that models use."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.checks.companion_values import replay
from dave_vit.engine import gradient
from dave_vit.engine.fast import PassKind, substitute_rules
from dave_vit.engine.fast.gates import gelu_gate
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.gradient import conservation_gap, effective_transformation
from dave_vit.engine.interception import Interception
from dave_vit.engine.rule_sets import EFFECTIVE, OFFICIAL_GATE, PLAIN
from dave_vit.engine.targets import class_logits
from fast_marker import needs_fast

D = 6


class Fn(nn.Module):
    """A function of [B, T, D] tokens as a model: its output, flattened, is the logits."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x).flatten(1)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def weights(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(function, x: Tensor, expected: Tensor | None = None, target: int = 7) -> Tensor:
    """Forward unchanged, identity conserved; returns W."""
    model = Fn(function)
    parts = gradient(model, x, target, rules=EFFECTIVE)
    torch.testing.assert_close(parts.logits, model(x), rtol=1e-12, atol=1e-12)
    assert conservation_gap(model, x, target) < 1e-12
    if expected is not None:
        torch.testing.assert_close(parts.weight[:, 0], expected, rtol=1e-9, atol=1e-12)
    return parts.weight[:, 0]


class TestActivations:
    @pytest.mark.parametrize(
        ("function", "at_zero"),
        [
            (F.gelu, 0.5),
            (lambda x: F.gelu(x, approximate="tanh"), 0.5),
            (F.silu, 0.5),
            (lambda x: F.silu(x.clone(), inplace=True), 0.5),
            (F.hardswish, 0.5),
            (F.mish, math.tanh(math.log(2))),
            (torch.tanh, 1.0),
            (F.elu, 1.0),
            (F.selu, 1.0507009873554805),
            (F.softsign, 1.0),
            (lambda x: F.relu6(x * 4), 0.0),
            (F.relu, 0.0),
            (lambda x: F.leaky_relu(x, 0.2), None),
            (torch.abs, None),
        ],
    )
    def test_only_x_carries(self, function, at_zero, x):
        weight = check(function, x)[0].flatten()[7]
        value = function(x)[0].flatten()[7]
        torch.testing.assert_close(weight * x[0].flatten()[7], value)
        if at_zero is not None:
            zero = torch.zeros_like(x)
            assert check(function, zero)[0].flatten()[7].item() == pytest.approx(at_zero)

    @pytest.mark.parametrize(
        "spelled",
        [
            lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
            lambda x: 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5)),
            nn.GELU(),
        ],
    )
    def test_gelu_by_hand(self, spelled, x):
        torch.testing.assert_close(check(spelled, x), check(F.gelu, x))

    def test_tanh_gelu_by_hand(self, x):
        def by_hand(x):
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

        torch.testing.assert_close(check(by_hand, x), check(lambda x: F.gelu(x, approximate="tanh"), x))

    def test_quick_gelu(self, x):
        weight = check(lambda x: x * torch.sigmoid(1.702 * x), x)
        torch.testing.assert_close(weight[0].flatten()[7], torch.sigmoid(1.702 * x[0].flatten()[7]))

    @pytest.mark.parametrize(
        "gated",
        [
            lambda a, b: F.silu(a) * b,
            lambda a, b: b * F.silu(a),
            lambda a, b: F.gelu(a).mul(b),
            lambda a, b: F.dropout(F.gelu(a), 0.1, training=False) * b,
            lambda a, b: torch.sigmoid(a) * b,
        ],
    )
    def test_gated_mlp_holds_the_whole_gate(self, gated, x):
        w = weights(2 * D, D)

        def mlp(x):
            a, b = F.linear(x, w).chunk(2, -1)
            return gated(a, b)

        weight = check(mlp, x)
        gate = (mlp(x) / F.linear(x, w)[..., D:])[0, 1, 1]  # target 7 is token 1, channel 1
        torch.testing.assert_close(weight[0, 1], gate * w[D + 1])

    def test_glu(self, x):
        w = weights(2 * D, D)
        by_hand = check(lambda x: F.linear(x, w)[..., :D] * torch.sigmoid(F.linear(x, w)[..., D:]), x)
        torch.testing.assert_close(check(lambda x: F.glu(F.linear(x, w), -1), x), by_hand)

    def test_official_gate_at_zero(self):
        zero = torch.zeros(1, 5, D, dtype=torch.float64)
        assert effective_transformation(Fn(F.gelu), zero, 0, rules=OFFICIAL_GATE)[0, 0, 0] == 1.0

    @needs_fast
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_gelu_for_a_compiler_is_exact_to_rounding(self, dtype):
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        x = every[every.abs() < 60]  # beyond, GELU is x or 0
        wide = x.double()
        share = torch.special.erfc(-wide * math.sqrt(0.5)) / 2
        assert (gelu_gate(x).double() - share).abs().max() <= 4e-7
        entered = x.clone().requires_grad_().clone()
        with Interception(substitute_rules(EFFECTIVE, PassKind.TRACED)) as mode:
            actual = F.gelu(mode.enter(entered)).detach()
        assert actual.dtype == dtype
        steps = actual.view(torch.int16).int() - (wide * share).to(dtype).view(torch.int16).int()
        assert steps.abs().max() <= 1  # between neighbours
        assert (steps != 0).float().mean() < 1e-3


class TestNorms:
    @staticmethod
    def reference(x: Tensor, gamma: Tensor, target: int = 7, eps: float = 1e-5, *, centred: bool = True) -> Tensor:
        """Row of the matrix form W_t X W_d of the paper's appendix A."""
        expected = torch.zeros_like(x)
        token, channel = divmod(target, D)
        for b in range(len(x)):
            row = torch.zeros(D, dtype=x.dtype)
            row[channel] = gamma[channel]
            if centred:
                row -= gamma[channel] / D
                sigma = (x[b, token].var(unbiased=False) + eps).sqrt()
            else:
                sigma = (x[b, token].square().mean() + eps).sqrt()
            expected[b, token] = row / sigma
        return expected

    def test_layer_norm(self, x):
        gamma, beta = weights(D), weights(D, seed=2)
        check(lambda x: F.layer_norm(x, (D,), gamma, beta), x, self.reference(x, gamma))

    @pytest.mark.parametrize("spelling", ["rsqrt", "sqrt", "std", "var_mean", "pow"])
    def test_layer_norm_by_hand(self, spelling, x):
        gamma, beta = weights(D), weights(D, seed=2)

        def by_hand(x):
            if spelling == "var_mean":
                var, mean = torch.var_mean(x, -1, unbiased=False, keepdim=True)
                return (x - mean) * torch.rsqrt(var + 1e-5) * gamma + beta
            centred = x - x.mean(-1, keepdim=True)
            if spelling == "rsqrt":
                return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * gamma + beta
            if spelling == "std":
                return centred / torch.sqrt(x.std(-1, unbiased=False, keepdim=True) ** 2 + 1e-5) * gamma + beta
            if spelling == "pow":
                return centred * (centred.pow(2).mean(-1, keepdim=True) + 1e-5).pow(-0.5) * gamma + beta
            return centred / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5) * gamma + beta

        check(by_hand, x, self.reference(x, gamma))

    @pytest.mark.parametrize(
        "norm",
        [
            lambda x, g: F.rms_norm(x, (D,), g, 1e-5),
            lambda x, g: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * g,
            lambda x, g: g * (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()),
        ],
    )
    def test_rms_norm(self, norm, x):
        gamma = weights(D)
        check(lambda x: norm(x, gamma), x, self.reference(x, gamma, centred=False))

    @pytest.mark.parametrize("eps", [None, 1e-3])
    @pytest.mark.parametrize(
        ("dtype", "autocast"),
        [
            (torch.float16, None),
            (torch.bfloat16, None),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16),
        ],
    )
    def test_rms_norm_in_half_precision(self, dtype, autocast, eps, x):
        """For small inputs the scale is nearly eps alone: that of the type in which torch computes."""
        norm, small = nn.RMSNorm(D, eps=eps).to(dtype), (x * 1e-3).to(dtype)
        parts = gradient(Fn(norm), small, 7, rules=EFFECTIVE, autocast=autocast)
        explained = (parts.weight[:, 0] * small).flatten(1).double().sum(1)
        torch.testing.assert_close(explained, parts.score[:, 0].double(), rtol=0.02, atol=0)

    @pytest.mark.parametrize(
        "norm",
        [
            lambda x: F.normalize(x, dim=-1),
            lambda x: x / x.norm(dim=-1, keepdim=True),
            lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True),
            lambda x: x * x.square().sum(-1, keepdim=True).rsqrt(),
        ],
    )
    def test_l2_normalisation(self, norm, x):
        expected = torch.zeros_like(x)
        expected[:, 1, 1] = 1.0 / x[:, 1].norm(dim=-1)
        check(norm, x, expected)

    def test_group_and_instance_norm(self, x):
        gamma, beta = weights(5), weights(5, seed=2)
        as_layers = check(lambda x: F.layer_norm(x, (D,)) * gamma[:, None] + beta[:, None], x)
        torch.testing.assert_close(check(lambda x: F.group_norm(x, 5, gamma, beta), x), as_layers)
        torch.testing.assert_close(check(lambda x: F.instance_norm(x, weight=gamma, bias=beta), x), as_layers)

    @pytest.mark.parametrize("rules", [EFFECTIVE, PLAIN], ids=lambda rules: rules.name)
    def test_batch_norm_in_both_memory_layouts(self, rules):
        norm = nn.BatchNorm2d(4).double().eval()
        norm.running_var.uniform_(0.5, 2.0)
        norm.running_mean.normal_()
        image = weights(1, 4, 3, 3)
        expected = torch.zeros_like(image)
        expected[0, 1, 0, 2] = (norm.running_var[1] + norm.eps).rsqrt()
        # Tokens after the norm: the gradient arrives in another layout than the input was in.
        weight = effective_transformation(Fn(lambda x: norm(x).flatten(2).transpose(1, 2)), image, 9, rules=rules)
        torch.testing.assert_close(weight, expected)


class TestAttention:
    HEADS = 2

    @classmethod
    def qkv(cls, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = F.linear(x, w, b).unflatten(-1, (3, cls.HEADS, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v  # [B, heads, T, d]

    def reference(self, x: Tensor, w: Tensor, b: Tensor, target: int = 7) -> Tensor:
        """A frozen, token by token and head by head."""
        q, k, _ = self.qkv(x, w, b)
        token, channel = divmod(target, D)
        head, width = channel // (D // self.HEADS), D // self.HEADS
        expected = torch.zeros_like(x)
        for i in range(len(x)):
            scores = q[i, head, token] @ k[i, head].T / math.sqrt(width)
            for other, share in enumerate(scores.softmax(0)):
                expected[i, other] = share * w[2 * D + channel]
        return expected

    @pytest.mark.parametrize("spelling", ["sdpa", "matmul", "einsum", "baddbmm", "bmm"])
    def test_spellings(self, spelling, x):
        w, b = weights(3 * D, D), weights(3 * D, seed=2)

        def attend(x):
            q, k, v = self.qkv(x, w, b)
            scale = q.shape[-1] ** -0.5
            if spelling == "sdpa":
                out = F.scaled_dot_product_attention(q, k, v)
            elif spelling == "matmul":
                out = ((q * scale) @ k.transpose(-2, -1)).softmax(-1) @ v
            elif spelling == "einsum":
                scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
                out = torch.einsum("bhij,bhjd->bhid", F.softmax(scores, dim=-1), v)
            elif spelling == "baddbmm":
                mask = torch.zeros(1, 1, 1, dtype=x.dtype)
                scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
                out = torch.bmm(nn.Softmax(-1)(scores), v.flatten(0, 1)).unflatten(0, v.shape[:2])
            else:
                scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) / math.sqrt(q.shape[-1])
                out = torch.softmax(scores, -1).bmm(v.flatten(0, 1)).view(v.shape)
            return out.transpose(1, 2).flatten(2)

        check(attend, x, self.reference(x, w, b))

    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("need_weights", [True, False])
    def test_multihead_module(self, batch_first, need_weights, x):
        torch.manual_seed(0)
        module = nn.MultiheadAttention(D, self.HEADS, batch_first=batch_first).double().eval()
        nn.init.normal_(module.in_proj_bias)

        def attend(x):
            x = x if batch_first else x.transpose(0, 1)
            out = module(x, x, x, need_weights=need_weights)[0]
            return out if batch_first else out.transpose(0, 1)

        def by_hand(x):
            q, k, v = self.qkv(x, module.in_proj_weight, module.in_proj_bias)
            return module.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

        torch.testing.assert_close(check(attend, x), check(by_hand, x))

    def test_multihead_masks_and_weights(self, x):
        torch.manual_seed(0)
        module = nn.MultiheadAttention(D, self.HEADS, batch_first=True).double().eval()
        padding = torch.zeros(2, 5, dtype=torch.bool)
        padding[:, 4] = True
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
        check(lambda x: module(x, x, x, key_padding_mask=padding[: len(x)], attn_mask=causal)[0], x)
        plain = module(x, x, x, key_padding_mask=padding)[1]
        seen = []
        effective_transformation(
            Fn(lambda x: (seen.append(module(x, x, x, key_padding_mask=padding)), seen[-1][0])[1]), x
        )
        torch.testing.assert_close(seen[0][1], plain)

    def test_encoder_layer_fast_path(self, x):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, 2, 12, activation="gelu", batch_first=True).double().eval()
        check(layer, x)

    @pytest.mark.parametrize("kwargs", [{"is_causal": True}, {"scale": 0.3}, {"attn_mask": weights(5, 5)}])
    def test_fused_options(self, kwargs, x):
        w, b = weights(3 * D, D), weights(3 * D, seed=2)
        check(lambda x: F.scaled_dot_product_attention(*self.qkv(x, w, b), **kwargs), x)

    def test_boolean_mask_and_grouped_queries(self, x):
        w, b = weights(3 * D, D), weights(3 * D, seed=2)
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        check(lambda x: F.scaled_dot_product_attention(*self.qkv(x, w, b), attn_mask=mask), x)
        shared = weights(2 * D // self.HEADS, D)

        def grouped(x):
            q, _, _ = self.qkv(x, w, b)
            k, v = F.linear(x, shared).unflatten(-1, (2, 1, -1)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        check(grouped, x)

    def test_slices_of_the_batch_change_nothing(self, x, monkeypatch):
        w, b = weights(3 * D, D), weights(3 * D, seed=2)
        model = Fn(lambda x: F.scaled_dot_product_attention(*self.qkv(x, w, b)))
        whole = effective_transformation(model, x, 7)
        monkeypatch.setattr("dave_vit.engine.fast.attention._SLICE_BYTES", 1)
        torch.testing.assert_close(effective_transformation(model, x, 7), whole)


class TestLinear:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x + 1.0,
            lambda x: 2.0 - x,
            lambda x: x * weights(D) + weights(5, D),
            lambda x: torch.cat([weights(1, 1, D).expand(len(x), -1, -1), x], 1),
            lambda x: F.pad(x, (1, 1), value=3.0),
            lambda x: torch.where(x > 0, x, 2.0),
            lambda x: x.masked_fill(x < 0, 1.5),
            lambda x: torch.addcmul(weights(D), weights(D), x),
            lambda x: torch.addmm(weights(D), x.flatten(0, 1), weights(D, D)).view_as(x),
            lambda x: F.conv1d(x, weights(3, 5, 2), weights(3)),
            lambda x: x.topk(3, -1).values,
            lambda x: x.sort(-1)[0],
            lambda x: F.max_pool1d(x, 2),
            lambda x: torch.stack(list(x.transpose(0, 1)), 1),
            lambda x: x.lerp(weights(5, D), 0.3),
            lambda x: torch.roll(x, 1, 1).flip(2)[:, 1:, ::2],
        ],
    )
    def test_constants_are_accounted_for(self, function, x):
        check(function, x, target=3)

    def test_in_place_functions(self, x):
        def in_place(x):
            y = x * 2
            y += weights(D)
            y.mul_(weights(D))
            y[:, 0] = x[:, 1] + 1
            z = torch.zeros_like(y)
            z.add_(y)
            return F.relu(z, inplace=True)

        check(in_place, x)

    def test_an_in_place_activation_changes_its_argument(self, x):
        def shared(x):
            y = x * 1.0
            return F.silu(y, inplace=True) + y  # both terms are silu(x)

        torch.testing.assert_close(check(shared, x), 2 * check(F.silu, x))

    def test_moving_average_of_attention_scores_is_an_operator(self, x):
        w = weights(D, D)
        check(lambda x: F.softmax(x @ w @ x.mT, -1).softmax(-1) @ x, x)


KEYWORDS = {
    "attention": (
        lambda x: F.scaled_dot_product_attention(query=x, key=x + 1, value=2 * x, attn_mask=weights(5, 5)),
        lambda x: F.scaled_dot_product_attention(x, x + 1, 2 * x, weights(5, 5)),
    ),
    "permute": (lambda x: torch.permute(input=x, dims=(0, 2, 1)), lambda x: x.permute(0, 2, 1)),
    "transpose": (lambda x: torch.transpose(input=x, dim0=1, dim1=2), lambda x: x.mT),
    "relu": (lambda x: F.relu(input=x.clone(), inplace=True), F.relu),
    "gelu": (lambda x: F.gelu(input=x), F.gelu),
    "sum": (lambda x: torch.sum(input=x, dim=1, keepdim=True) + x, lambda x: x.sum(1, keepdim=True) + x),
    "bmm": (lambda x: torch.bmm(input=x.sigmoid(), mat2=x.mT), lambda x: x.sigmoid() @ x.mT),
    "addcmul": (
        lambda x: torch.addcmul(x, tensor1=x.sigmoid(), tensor2=x, value=2.0),
        lambda x: x + 2 * x.sigmoid() * x,
    ),
    "where": (lambda x: torch.where(condition=x > 0, input=x, other=2 * x), lambda x: torch.where(x > 0, x, 2 * x)),
    "div": (lambda x: torch.div(input=x, other=x.exp()), lambda x: x / x.exp()),
    "layer_norm": (lambda x: F.layer_norm(input=x, normalized_shape=(D,)), lambda x: F.layer_norm(x, (D,))),
    "linear": (lambda x: F.linear(input=x, weight=weights(D, D)), lambda x: F.linear(x, weights(D, D))),
    "cat": (lambda x: torch.cat(tensors=[x, 2 * x], dim=1), lambda x: torch.cat([x, 2 * x], 1)),
    "softmax": (lambda x: F.softmax(input=x, dim=-1) @ x.mT, lambda x: x.softmax(-1) @ x.mT),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_arguments_by_name(name, x):
    named, placed = KEYWORDS[name]
    check(named, x, check(placed, x))
    assert abs(replay(Fn(named), x, 2 * x, class_logits) - replay(Fn(placed), x, 2 * x, class_logits)).max() < 1e-12


class ClassToken(nn.Module):
    """Attention with its tensors by name, of which the first token alone is used."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ weights(D, 3 * D)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query=q, key=k, value=v)
        return mixed[:, 0] @ weights(D, D)


def test_arguments_by_name_in_a_recording(x):
    expected = gradient(ClassToken(), x, 1, rules=EFFECTIVE).weight
    actual = RecordedModel(ClassToken()).gradient(x, 1, EFFECTIVE).weight
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
