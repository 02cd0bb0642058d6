"""Rare forms of functions: in place with another shape, with a reduction, of complex numbers, of inference tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit import DAVE, conservation_gap
from dave_vit.checks.companion_values import replay
from dave_vit.engine import gradient
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.rule_sets import EFFECTIVE, RELEVANCE
from dave_vit.engine.targets import class_logits
from dave_vit.errors import UnsupportedOperator

X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
INDEX = torch.randint(0, 4, (2, 4, 6), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """A function of tokens ``[B, 4, 6]`` between an embedding and a head."""

    def __init__(self, function) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.embed, self.head = nn.Conv2d(3, 6, 4, 4), nn.Linear(6, 5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
        self.function = function
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.function(F.gelu(tokens)).mean(1))


def compute(function, rules=EFFECTIVE) -> Tensor:
    model = Model(function)
    assert conservation_gap(model, X, 1, rules=rules) < 1e-12
    return gradient(model, X, 1, rules=rules).weight


def written(change) -> Tensor:
    """The tensor into which something was written."""

    def run(tokens):
        copy = tokens * 2
        change(copy)
        return copy

    return run


PAIRS = {
    "unsqueeze_": (lambda t: (t * 2).unsqueeze_(1).squeeze_(1), lambda t: t * 2),
    "transpose_": (lambda t: (t * 2).transpose_(1, 2).mT, lambda t: t * 2),
    "swapaxes_": (lambda t: (t * 2).swapaxes_(1, 2).softmax(-1).mT * t, lambda t: (t * 2).mT.softmax(-1).mT * t),
    "t_": (lambda t: torch.stack([(one * 2).t_().t() for one in t]), lambda t: t * 2),
    "neg_": (written(lambda copy: copy[:, :2].neg_()), lambda t: torch.cat([-2 * t[:, :2], 2 * t[:, 2:]], 1)),
    "scatter(reduce=add)": (
        lambda t: t.scatter(1, INDEX[: len(t)], 2 * t, reduce="add"),
        lambda t: t.scatter_add(1, INDEX[: len(t)], 2 * t),
    ),
    "scatter_(reduce=add)": (
        lambda t: t.clone().scatter_(1, INDEX[: len(t)], src=2 * t, reduce="add"),
        lambda t: t.scatter_add(1, INDEX[: len(t)], 2 * t),
    ),
}


@pytest.mark.parametrize("rules", [EFFECTIVE, RELEVANCE], ids=lambda rules: rules.name)
@pytest.mark.parametrize("name", PAIRS)
def test_forms_agree(name, rules):
    rare, plain = PAIRS[name]
    torch.testing.assert_close(compute(rare, rules), compute(plain, rules), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_replays_agree(name):
    rare, plain = (replay(Model(function), X, 2 * X + 1, class_logits) for function in PAIRS[name])
    torch.testing.assert_close(rare, plain, rtol=1e-9, atol=1e-12)


def _write_into_part(tokens: Tensor) -> Tensor:
    first, second = (tokens * 2).split(3, -1)
    return torch.cat([first.mul_(2), second], -1)


def _copy_below(tokens: Tensor) -> Tensor:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tokens)).sigmoid()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_write_into_part, "mul in module 'Model' is not supported .* one of several views"),
        (
            lambda t: t.scatter(1, INDEX[: len(t)], 2 * t, reduce="multiply"),
            r"scatter\(reduce='multiply'\) in module 'Model'",
        ),
        (lambda t: t.scatter(1, INDEX[: len(t)], 2.0, reduce="add"), r"scatter\(reduce='add'\) in module 'Model'"),
        (lambda t: t * torch.from_dlpack(t.detach()), "__dlpack__ in module 'Model'"),
        (lambda t: t * _copy_below(t.detach()), "mul in module 'Model' takes for a constant changes with the image"),
    ],
)
def test_refused_in_one_line(function, message):
    model = Model(function)
    for run in (lambda: gradient(model, X, 1, rules=EFFECTIVE), lambda: DAVE(model, samples=2).attribute(X, 1)):
        with pytest.raises(UnsupportedOperator, match=message) as error:
            run()
        assert "\n" not in str(error.value)


def test_an_error_of_the_model_stays_its_own():
    with pytest.raises(RuntimeError, match="must match the size"):
        gradient(Model(lambda t: t + torch.ones(7, dtype=t.dtype)), X, 1, rules=EFFECTIVE)


class ComplexModel(nn.Module):
    """Linear in the image, by complex weights."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        draw = {"dtype": torch.complex128, "generator": generator}
        self.stride, self.scale = stride, torch.randn(1, 1, 8, 8, **draw)
        self.kernel, self.bias = torch.randn(4, 3, 4, 4, **draw), torch.randn(4, **draw)
        self.matrix = torch.randn(5, 4, **draw)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.fft.fft2(torch.complex(x, 2 * x)) * self.scale
        maps = F.conv2d(seen, self.kernel, self.bias, self.stride).mean((2, 3))
        return F.linear(maps, self.matrix).real


@pytest.mark.parametrize("rules", [EFFECTIVE, RELEVANCE], ids=lambda rules: rules.name)
@pytest.mark.parametrize("stride", [1, 4])
def test_complex_numbers(stride, rules):
    model, x = ComplexModel(stride), X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    torch.testing.assert_close(gradient(model, X, 1, rules=rules).weight[:, 0], expected, rtol=1e-9, atol=1e-12)
    assert conservation_gap(model, X, 1, rules=rules) < 1e-12


def test_complex_norm():
    weight = torch.full((6,), 2j, dtype=torch.complex128)
    assert conservation_gap(Model(lambda t: F.rms_norm(torch.complex(t, 2 * t), (6,), weight).imag), X, 1) < 1e-12


@pytest.mark.parametrize("function", [torch.tanh, F.silu])
def test_complex_activations_are_refused(function):
    with pytest.raises(UnsupportedOperator, match="in module 'Model'"):
        gradient(Model(lambda t: function(torch.complex(t, 2 * t)).imag), X, 1, rules=EFFECTIVE)


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        made = Model(lambda t: F.layer_norm(t, (6,)))
    for rules in (EFFECTIVE, RELEVANCE):
        expected = gradient(Model(lambda t: F.layer_norm(t, (6,))), X, 1, rules=rules).weight
        torch.testing.assert_close(gradient(made, X, 1, rules=rules).weight, expected)
        torch.testing.assert_close(RecordedModel(made).gradient(X, 1, rules).weight, expected)


def test_half_precision_on_a_cpu():
    model, x = Model(lambda t: F.scaled_dot_product_attention(t, t, F.layer_norm(t, (6,)))), X.half()
    expected = DAVE(model, samples=2).attribute(X, 1)
    actual = DAVE(model.half(), samples=2).attribute(x, 1).double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
