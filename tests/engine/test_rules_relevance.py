"""Alpha-beta relevance: each rule by its formula, and conservation through whole models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_models
from dave_vit.engine.interception import Interception
from dave_vit.engine.observation import observe
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.chefer import alpha_beta

GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def relevances(function, *inputs: Tensor, given: Tensor | None = None, alpha: float = 1.0) -> list[Tensor]:
    """Relevance of each input, where the result has the given one (ones by default); the value is the plain one."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    entered = [leaf.clone() for leaf in leaves]  # a leaf would be taken for a parameter
    with Interception(alpha_beta(alpha)):
        value = function(*entered)
    torch.testing.assert_close(value.detach(), function(*inputs))
    return list(torch.autograd.grad(value, leaves, torch.ones_like(value) if given is None else given))


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_linear_layers_by_the_formula(alpha):
    x, weight, bias, given = draw(3, 20), draw(5, 20), draw(5), draw(3, 5)
    (actual,) = relevances(lambda x: F.linear(x, weight, bias), x, given=given, alpha=alpha)
    parts = x[:, None] * weight  # [3, 5, 20]
    rise, fall = parts.clamp(min=0), parts.clamp(max=0)
    shares = alpha * rise / rise.sum(-1, keepdim=True) - (alpha - 1) * fall / fall.sum(-1, keepdim=True)
    torch.testing.assert_close(actual, (shares * given[..., None]).sum(1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(actual.sum(), given.sum(), atol=1e-6, rtol=1e-6)


def test_constant_matrices_and_convolutions_are_linear_layers():
    x, weight, given = draw(3, 4), draw(5, 4), draw(3, 5)
    (expected,) = relevances(lambda x: F.linear(x, weight), x, given=given)
    spellings = (lambda x: x @ weight.mT, lambda x: (weight @ x.mT).mT, lambda x: torch.einsum("bi,oi->bo", x, weight))
    for spelling in spellings:
        torch.testing.assert_close(relevances(spelling, x, given=given)[0], expected)
    (actual,) = relevances(lambda x: F.conv2d(x[..., None, None], weight[..., None, None])[..., 0, 0], x, given=given)
    torch.testing.assert_close(actual, expected)


def test_sums_share_by_contribution_and_size():
    a, b, given = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 3.0]), torch.tensor([0.4, 0.8])
    first, second = relevances(lambda a, b: a + b, a.double(), b.double(), given=given.double())
    torch.testing.assert_close(first, torch.tensor([0.3, 0.2]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(second, torch.tensor([0.1, 0.6]).double(), atol=1e-6, rtol=0)
    # Parts of opposite sign: -1 and 2 of relevance 1 become 1/3 and 2/3 in total.
    first, second = relevances(lambda a, b: a - b, torch.tensor([1.0]).double(), torch.tensor([2.0]).double())
    torch.testing.assert_close(torch.cat([first, second]), torch.tensor([1 / 3, 2 / 3]).double(), atol=1e-6, rtol=0)


def test_products_share_half_and_half():
    a, b, given = draw(2, 3, 4), draw(2, 4, 5), draw(2, 3, 5)
    first, second = relevances(torch.matmul, a, b, given=given)
    ratio = given / (a @ b)
    torch.testing.assert_close(first, a * (ratio @ b.mT) / 2, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(second, b * (a.mT @ ratio) / 2, atol=1e-6, rtol=1e-5)
    c = draw(2, 3, 4)
    for actual in relevances(torch.mul, a, c, given=c):
        torch.testing.assert_close(actual, c / 2)


@pytest.mark.parametrize(
    "function",
    [
        F.gelu,
        lambda x: F.layer_norm(x, (4,)),
        lambda x: x.softmax(-1),
        lambda x: x * torch.tensor([0.5, 2.0, -1.0, 3.0]),
        lambda x: x / 7,
        lambda x: F.dropout(x, 0.5, False),
        lambda x: x.to(torch.float64),
    ],
)
def test_what_passes_relevance_on(function):
    given = draw(3, 4)
    torch.testing.assert_close(relevances(function, draw(3, 4), given=given)[0], given)


def test_means_share_by_contribution():
    x = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(relevances(lambda x: x.mean(1), x)[0], torch.tensor([[0.25, 0.75]]).double())


def test_float32_models_are_computed_in_float64():
    model, images = tiny_models.vit(), tiny_models.images(1)
    with observe(model, images.double(), rules=alpha_beta()) as seen:
        assert seen.logits.dtype == torch.float64
        narrow = torch.autograd.grad(seen.logits[:, 1].sum(), [actual.matrix for actual in seen.attention])
    with observe(model.double(), images.double(), rules=alpha_beta()) as seen:
        exact = torch.autograd.grad(seen.logits[:, 1].sum(), [actual.matrix for actual in seen.attention])
    for actual, expected in zip(narrow, exact, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


def test_relevance_is_conserved_through_a_transformer():
    # Tokens get back all that their attention got, of which values take one half and the matrix the other.
    model, images = tiny_models.vit(), tiny_models.images(1)
    with observe(model, images.double(), rules=alpha_beta()) as seen:
        (tokens,) = torch.autograd.grad(seen.logits[:, 1].sum(), seen.attention[-1].tokens, retain_graph=True)
        (matrix,) = torch.autograd.grad(seen.logits[:, 1].sum(), seen.attention[-1].matrix)
    assert float(matrix.abs().sum()) > 0
    assert float(tokens.sum()) == pytest.approx(2 * float(matrix.sum()), rel=1e-4)


def test_functions_without_a_rule_are_refused():
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cummax(x.flatten(1), 1).values

    with pytest.raises(UnsupportedOperator, match="cummax"), observe(Odd(), draw(1, 3, 2, 2), rules=alpha_beta()):
        pass
