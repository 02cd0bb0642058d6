"""Functions that some model families need of the engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dave_vit import conservation_gap, effective_transformation
from dave_vit.engine.rules.attention import attention_matrix
from dave_vit.errors import UnsupportedOperator


class Fn(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, images):
        return self.function(images).flatten(1)


@pytest.fixture
def images():
    return torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class TestPower:
    """ReLU squared is x times a gate (MetaFormer's StarReLU); the square of anything else is a scale."""

    @pytest.mark.parametrize("spelling", [lambda x: x**2, torch.square, lambda x: x.pow(2), lambda x: torch.pow(x, 2)])
    def test_relu_squared(self, images, spelling):
        model = Fn(lambda x: 0.7 * spelling(F.relu(x)) - 0.4)
        weight = effective_transformation(model, images, 3)
        assert weight.flatten()[3] == pytest.approx(0.7 * float(images.flatten()[3].relu()))
        assert conservation_gap(model, images) < 1e-14

    def test_in_place(self, images):
        assert conservation_gap(Fn(lambda x: (2 * F.relu(x)).pow_(2)), images) < 1e-14

    @pytest.mark.parametrize("power", [0.5, -1.0, 0])
    def test_roots_and_inverses_stay_scales(self, images, power):
        with pytest.raises(UnsupportedOperator):
            effective_transformation(Fn(lambda x: (F.relu(x) + 1) ** power), images, 0)

    def test_the_square_of_a_carrier_is_no_carrier(self, images):
        with pytest.raises(UnsupportedOperator):
            effective_transformation(Fn(lambda x: x + x**2), images, 0)
        with pytest.raises(UnsupportedOperator):
            effective_transformation(Fn(lambda x: x + F.relu(x) ** x), images, 0)

    def test_norms_of_activations_are_scales_as_before(self, images):
        def normed(x):
            y = F.relu(x)
            return y / (y**2).mean((1, 2, 3), keepdim=True).sqrt()

        weight = effective_transformation(Fn(normed), images, 5)
        scale = images.relu().square().mean().sqrt()
        assert weight.flatten()[5] == pytest.approx(float((images.flatten()[5] > 0) / scale))


class TestSolve:
    """The solution of A X = B is linear in B; A, an operator, is held (gated delta attention)."""

    @pytest.mark.parametrize("triangular", [True, False])
    def test_it_is_the_product_with_the_inverse(self, images, triangular):
        def solved(x):
            system = (x @ x.mT).softmax(-1).tril() + torch.eye(4, dtype=x.dtype)
            right = 2 * x + 1
            if triangular:
                return torch.linalg.solve_triangular(system, right, upper=False)
            return torch.linalg.solve(system, right)

        system = (images @ images.mT).softmax(-1).tril() + torch.eye(4, dtype=images.dtype)
        expected = torch.zeros_like(images)
        expected[0, 1, :, 2] = 2 * system.inverse()[0, 1, 3]  # of the number at [1, 3, 2]
        torch.testing.assert_close(effective_transformation(Fn(solved), images, 30), expected)
        assert conservation_gap(Fn(solved), images) < 1e-12

    def test_a_system_alone_is_no_carrier(self, images):
        right = torch.ones(4, 1, dtype=images.dtype)
        with pytest.raises(UnsupportedOperator):
            effective_transformation(Fn(lambda x: torch.linalg.solve(x + 9 * torch.eye(4), right)), images, 0)


class TestInPlaceSelections:
    @pytest.mark.parametrize("function", [F.leaky_relu_, F.relu_, torch.abs_, nn.LeakyReLU(inplace=True)])
    def test_the_derivative_is_that_of_the_input(self, images, function):
        model = Fn(lambda x: function(x * 1.0))
        plain = {F.relu_: F.relu, torch.abs_: torch.abs}.get(function, F.leaky_relu)
        expected = effective_transformation(Fn(plain), images, 2)
        assert torch.equal(effective_transformation(model, images, 2), expected)
        assert conservation_gap(model, images) < 1e-14


class TestInfinitePadding:
    """Max-pooling that keeps the size pads with -inf (ResNet v2, NASNet)."""

    def test_it_neither_counts_nor_spoils_the_identity(self, images):
        def pooled(x):
            return F.max_pool2d(F.pad(x + 0.5, (0, 1, 0, 1), value=-torch.inf), 2)

        model = Fn(pooled)
        assert conservation_gap(model, images) < 1e-14
        assert torch.isfinite(effective_transformation(model, images, 0)).all()

    def test_where_it_reaches_the_logits_nothing_is_claimed(self, images):
        model = Fn(lambda x: F.pad(x, (0, 1), value=-torch.inf))
        assert not conservation_gap(model, images, 4) < 1e-9


def test_half_types_do_not_round_scores_before_the_softmax():
    """Rounding them first costs a per cent, where the matrix itself can be kept to a few tenths of one."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 64, 32, generator=generator).mul(1.8).bfloat16() for _ in range(2))
    exact = attention_matrix(query.double(), key.double())
    rounded = ((query @ key.mT) / 32**0.5).softmax(-1)  # as a model in this type would spell it

    def error(matrix):
        return float((matrix.double() - exact).norm() / exact.norm())

    assert error(rounded) > 0.008
    assert error(attention_matrix(query, key)) < 0.0025
