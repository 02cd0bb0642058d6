"""The gamma rule: against its definition in float64, and what it promises."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import tiny_models
from dave_vit import DAVE, conservation_gap, effective_transformation
from dave_vit.engine import gradient
from dave_vit.engine.fast import linear
from dave_vit.engine.fast.compiled import CompiledGradient
from dave_vit.engine.fast.linear import sum_last
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.rule_sets import CP_LRP, EFFECTIVE, RELEVANCE, with_gamma
from dave_vit.engine.rules.gamma import Gamma
from dave_vit.engine.targets import Target

X = tiny_models.images(2, torch.float64)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def defined(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Relevance of each input by the rule's definition, contribution by contribution: [I] for [I], [O, I], [O], [O]."""
    relevance = torch.zeros_like(x)
    for j in range(len(weight)):
        parts = torch.cat([x * weight[j], bias[j : j + 1]])
        z = parts.sum()
        lifted = torch.where(parts * z > 0, (1 + gamma) * parts, parts)
        relevance += z * grad[j] * lifted[:-1] / lifted.sum()
    return relevance


class Linear(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("gamma", [0.05, 0.25, 3.0])
def test_definition(gamma):
    x, weight, bias, grad = drawn(7), drawn(5, 7, seed=1), drawn(5, seed=2), drawn(5, seed=3)
    rules = with_gamma(EFFECTIVE, Gamma(gamma, gamma))
    actual = effective_transformation(Linear(weight, bias), x[None], lambda y: y @ grad, rules=rules)
    torch.testing.assert_close(actual[0] * x, defined(x, weight, bias, grad, gamma), rtol=1e-12, atol=1e-12)


def test_flat_is_the_rule_where_absolute_weights_have_rank_one():
    x, signs, grad, bias = drawn(7), drawn(5, 7, seed=1).sign(), drawn(5, seed=3), drawn(5, seed=2)
    weight = signs * (drawn(5, seed=4).abs()[:, None] * drawn(7, seed=5).abs())
    rules = with_gamma(EFFECTIVE, Gamma(0.3, 0.3, flat=True))
    actual = effective_transformation(Linear(weight, bias), x[None], lambda y: y @ grad, rules=rules)
    torch.testing.assert_close(actual[0] * x, defined(x, weight, bias, grad, 0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_a_convolution_is_the_linear_layer_of_its_windows(flat, stride):
    """Checked on one window: a convolution over a picture of the kernel's size, and on many by linearity of the sum."""
    x, weight, bias = drawn(2, 3, 8, 8), drawn(5, 3, 4, 4, seed=1), drawn(5, seed=2)
    rules = with_gamma(EFFECTIVE, Gamma(0.25, 0.25, flat=flat))

    class Convolved(nn.Module):
        def forward(self, x):
            return torch.nn.functional.conv2d(x, weight, bias, stride).flatten(1)

    class Unfolded(nn.Module):
        def forward(self, x):
            windows = torch.nn.functional.unfold(x, 4, stride=stride).mT  # [B, L, 48]
            return torch.nn.functional.linear(windows, weight.flatten(1), bias).mT.flatten(1)

    grad = drawn(Convolved()(x).shape[1], seed=3)
    actual, expected = (
        effective_transformation(model, x, lambda y: y @ grad, rules=rules) for model in (Convolved(), Unfolded())
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", [None, Gamma(0.25, 0.25), Gamma(0.25, 0.25, flat=True)])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("size", [(8, 8), (9, 11)])
def test_patches_as_a_product_are_the_convolution(form, on_gpu, size, monkeypatch):
    """Windows that lie side by side, and what is left over at the border."""
    x = drawn(2, 3, *size)
    model = nn.Sequential(nn.Conv2d(3, 5, 4, stride=4), nn.Flatten()).double().eval()
    rules = EFFECTIVE if form is None else with_gamma(EFFECTIVE, form)
    with monkeypatch.context() as patched:
        patched.setattr(linear, "are_windows_adjacent", lambda *args, **kwargs: False)
        expected = effective_transformation(model, x, 7, rules=rules)
    monkeypatch.setattr(linear, "prefers_product", lambda input: on_gpu)
    actual = gradient(model, x, 7, rules=rules, record_constants=True)
    torch.testing.assert_close(actual.weight[:, 0], expected, rtol=1e-10, atol=1e-10)
    assert [constant.value.shape for constant in actual.constants] == [model[0](x).shape]  # as methods place them
    assert conservation_gap(model, x, 7, rules=rules) < 1e-9
    if not on_gpu:  # the model's own forward pass, to the bit
        assert torch.equal(actual.logits, model(x))


@pytest.mark.parametrize("bias", [True, False])
def test_written_for_a_compiler_it_is_the_same(bias, monkeypatch):
    monkeypatch.setattr("dave_vit.engine.fast.compiled.compile_graph", lambda graph, given: graph)
    model = tiny_models.vit().double()
    if not bias:
        model.blocks[0].mlp.fc1.bias = None
    expected = effective_transformation(model, X, [[0], [1]], rules=RELEVANCE)
    actual, _ = CompiledGradient(model, RELEVANCE)(X, Target(torch.tensor([[0], [1]])))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("width", [5, 1024, 1025, 3072, 4304])
def test_long_rows_are_summed_in_pieces(width):
    values = torch.randn(2, 3, width, dtype=torch.float64)
    torch.testing.assert_close(sum_last(values), values.sum(-1, keepdim=True))


CONVOLUTIONS = {
    "groups": nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4),
    "dilated": nn.Conv2d(4, 5, 3, dilation=2, padding="same"),
    "transposed": nn.ConvTranspose2d(4, 4, 3, stride=2),
    "without bias": nn.Conv2d(4, 5, 3, bias=False),
}


class TestConservation:
    @pytest.mark.parametrize(
        "rules", [RELEVANCE, with_gamma(CP_LRP, Gamma()), with_gamma(CP_LRP, Gamma(1.0, 0.5, 0.2))]
    )
    @pytest.mark.parametrize("family", ["vit", "torchvision", "swin", "cnn"])
    def test_of_whole_models(self, family, rules):
        assert conservation_gap(tiny_models.FAMILIES[family]().double(), X, [0, 1], rules=rules) < 1e-9

    @pytest.mark.parametrize("flat", [False, True])
    @pytest.mark.parametrize("name", CONVOLUTIONS)
    def test_of_convolutions(self, name, flat):
        model = nn.Sequential(CONVOLUTIONS[name], nn.Flatten(), nn.LazyLinear(3)).double().eval()
        x = drawn(2, 4, 9, 9)
        model(x)
        rules = with_gamma(EFFECTIVE, Gamma(0.3, 0.1, flat=flat))
        assert conservation_gap(model, x, [0, 2], rules=rules) < 1e-9

    def test_nothing_to_share_gives_nothing(self):
        model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
        for parameter in model.parameters():
            parameter.data.zero_()
        actual = effective_transformation(model, drawn(2, 6), 0, rules=RELEVANCE)
        assert torch.equal(actual, torch.zeros_like(actual))


class TestWhere:
    def test_projections_of_attention_stay_exact(self):
        model = tiny_models.vit().double()
        expected = gradient(model, X, 0, rules=RELEVANCE).weight
        none = with_gamma(CP_LRP, Gamma(0.25, 0.05, 0.05, flat=True))
        assert not torch.allclose(gradient(model, X, 0, rules=none).weight, expected)

    @pytest.mark.parametrize("family", ["vit", "torchvision", "swin"])
    def test_lean_passes_know_the_modules_too(self, family):
        model = tiny_models.FAMILIES[family]().double()
        actual = RecordedModel(model).gradient(X, 0, RELEVANCE).weight
        torch.testing.assert_close(actual, gradient(model, X, 0, rules=RELEVANCE).weight, rtol=1e-8, atol=1e-10)

    def test_a_linear_patch_embedding_is_a_convolution(self):
        class Embedding(nn.Module):
            def __init__(self, name: str) -> None:
                super().__init__()
                setattr(self, name, nn.Linear(6, 3))
                self.name = name

            def forward(self, x):
                return getattr(self, self.name)(x)

        named, other = Embedding("to_patch_embedding").double(), Embedding("layer").double()
        other.layer.load_state_dict(named.to_patch_embedding.state_dict())
        x = drawn(2, 6)
        rules = with_gamma(EFFECTIVE, Gamma(conv=0.4, linear=0.1))
        swapped = with_gamma(EFFECTIVE, Gamma(conv=0.1, linear=0.4))
        actual = effective_transformation(named, x, 0, rules=rules)
        assert not torch.allclose(actual, effective_transformation(other, x, 0, rules=rules))
        assert torch.equal(actual, effective_transformation(other, x, 0, rules=swapped))


class TestPrecision:
    def test_bfloat16_stays_near(self):
        model, x = tiny_models.vit(), X.float()
        exact = effective_transformation(model, x, 0, rules=RELEVANCE)
        rounded = effective_transformation(model, x, 0, rules=RELEVANCE, autocast=torch.bfloat16)
        assert rounded.dtype == torch.float32
        assert torch.cosine_similarity(exact.flatten(), rounded.flatten(), 0) > 0.99

    def test_flat_is_near_the_full_rule(self):
        model = tiny_models.vit().double()
        flat, full = (
            effective_transformation(model, X, 0, rules=rules) * X for rules in (RELEVANCE, with_gamma(CP_LRP, Gamma()))
        )
        assert torch.cosine_similarity(flat.flatten(), full.flatten(), 0) > 0.95

    def test_a_write_into_the_input_afterwards_does_no_harm(self):
        class Writes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

            def forward(self, x):
                x = x * 1.0
                x += self.first(x)
                return self.second(x)

        assert conservation_gap(Writes().double(), drawn(2, 6), 0, rules=RELEVANCE) < 1e-9


def _cnn(*, inplace: bool) -> nn.Module:
    squeeze = [nn.Conv2d(6, 4, 1), nn.ReLU(inplace=inplace), nn.Conv2d(4, 6, 2, stride=2), nn.ReLU6(inplace=inplace)]
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=inplace), *squeeze, nn.Flatten(), nn.Linear(1350, 5))
    return tiny_models.drawn(model).double()


def test_activations_in_place_after_convolutions():
    """A 1 x 1 convolution is run as a product of windows, whose value must not be a view."""
    target = Target.of([1, 3], 2)
    plain = gradient(_cnn(inplace=False), X, target, rules=RELEVANCE)
    written = gradient(_cnn(inplace=True), X, target, rules=RELEVANCE)
    torch.testing.assert_close(written.weight, plain.weight, rtol=1e-12, atol=1e-12)
    assert conservation_gap(_cnn(inplace=True), X, rules=RELEVANCE) < 1e-12


class GatedBlock(nn.Module):
    """A packed gated unit, and attention whose modules do not say so."""

    def __init__(self):
        super().__init__()
        self.mixing, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.packed, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x):
        query, key, value = self.mixing(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        value, gate = self.packed(x).chunk(2, -1)
        return x + self.down(value * nn.functional.silu(gate))


class GatedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Conv2d(3, 8, 4, stride=4), GatedBlock(), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.block(self.embed(x).flatten(2).transpose(1, 2))[:, 0])


def test_a_map_does_not_depend_on_whether_it_is_recorded():
    """A recording cuts layers, and a hook that does nothing prevents it."""
    model, images = tiny_models.drawn(GatedModel()).double(), drawn(3, 3, 16, 16)
    options = {"samples": 4, "seed": 1}
    recorded = DAVE(model, **options).attribute(images, 1)
    alone = DAVE(model, **options).attribute(images[1:2], 1)
    model.block.register_forward_hook(lambda *_: None)
    expected = DAVE(model, **options).attribute(images, 1)
    torch.testing.assert_close(recorded, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(alone, expected[1:2], rtol=1e-9, atol=1e-12)


def run_block(block, x):
    """Run a block of timm without calling its attention."""
    attention = block.attn
    parts = nn.functional.linear(block.norm1(x), attention.qkv.weight, attention.qkv.bias)
    parts = parts.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2).flatten(2)
    x = x + nn.functional.linear(mixed, attention.proj.weight, attention.proj.bias)
    return x + block.mlp(block.norm2(x))


def test_layers_are_known_by_their_parameters():
    """From which module a layer is called does not count."""
    model = tiny_models.vit().double()
    expected = effective_transformation(model, X, 1, rules=RELEVANCE)
    for block in model.blocks:
        block.forward = partial(run_block, block)
    torch.testing.assert_close(effective_transformation(model, X, 1, rules=RELEVANCE), expected)
