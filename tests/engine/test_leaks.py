"""Programs in which something that depends on the image could pass for a constant: exact or refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit import conservation_gap, effective_transformation
from dave_vit.errors import UnsupportedOperator
from exactness import Tokens, assert_exact, assert_exact_or_refused, drawn, refusal

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct")
B, T, D = 1, 5, 6  # one image: what mixes a batch has tests of its own
X = drawn(B, T, D, seed=1)
WEIGHT, BIAS = drawn(D, D), drawn(D, seed=2)


def written(x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    early = buffer[:, :3]
    buffer.copy_(x.exp())
    return x[:, :3] + early


def written_by_a_view(x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    buffer.view(-1).copy_(x.exp().flatten())
    return x + buffer


def through_data(x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    buffer.data.copy_(x.exp())
    return x + buffer


def carried_through_data(x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    buffer.data.copy_(x)
    return x + buffer


def replaced_data(x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    buffer.data = x.exp()
    return x + buffer


def set_to(x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    buffer.set_(x.exp())
    return x + buffer


def out_buffer(x: Tensor) -> Tensor:
    buffer = torch.empty_like(x)
    torch.exp(x.detach(), out=buffer)
    return x + buffer


def out_buffer_of_a_carrier(x: Tensor) -> Tensor:
    buffer = torch.empty_like(x)
    torch.exp(x, out=buffer)
    return x + buffer


def several_buffers(x: Tensor) -> Tensor:
    buffers = [torch.zeros_like(x), torch.zeros_like(x)]
    torch._foreach_add_(buffers, [x.exp(), x.exp()])
    return x + buffers[0]


def write_below(x: Tensor, below) -> Tensor:
    y = x * 2
    below(y)
    return y


def in_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy() ** 2)


def counted(x: Tensor) -> Tensor:
    return x + (x > 0).nonzero().shape[0]


def numbered(x: Tensor) -> Tensor:
    return x + x.new_ones(len((x > 0).nonzero())).sum()


def view_of_what_is_overwritten(x: Tensor) -> Tensor:
    y = x * 2
    early = y[:, :3]
    y.copy_(x.exp())
    return x[:, :3] + early


OPERATORS_AS_CONSTANTS = {
    "full_like": lambda x: x + torch.full_like(x, x.mean().detach()),
    "new_full": lambda x: x + x.new_full((D,), x.mean().detach()),
    "full": lambda x: x + torch.full((D,), x.mean().detach()),
    "new_tensor": lambda x: x + x.new_tensor(x.exp()),
    "new_tensor of numbers": lambda x: x + x.new_tensor([t.exp() for t in x[0, 0]]),
    "tensor": lambda x: x + torch.tensor(x.exp()),
    "as_tensor": lambda x: x + torch.as_tensor(x.exp()),
    "asarray": lambda x: x + torch.asarray(x.exp()),
    "scalar_tensor": lambda x: x + torch.scalar_tensor(x.mean().detach()),
    "requires_grad_": lambda x: x + x.detach().requires_grad_(),
    "requires_grad_ of an exponential": lambda x: x + x.exp().requires_grad_(),
    "requires_grad set": lambda x: x + _wanting(x.exp()),
    "Parameter": lambda x: x + nn.Parameter(x.exp()),
    "int": lambda x: x + int(x.sum() * 10),
    "round": lambda x: x + round(float(x.sum())),
    "index": lambda x: x + len(range(x.argmax())),
    "float": lambda x: x + float(x.sum()),
    "integer item": lambda x: x + x.argmax().item(),
    "integer tolist": lambda x: x + x.argsort(-1)[0, 0].tolist()[0],
    "complex item": lambda x: x + torch.complex(x, x).exp().sum().item().real,
    "view before a write": written,
    "write through a view": written_by_a_view,
    "view of what is overwritten": view_of_what_is_overwritten,
    "write through data": through_data,
    "carrier through data": carried_through_data,
    "data replaced": replaced_data,
    "set_": set_to,
    "out": out_buffer,
    "out of a carrier": out_buffer_of_a_carrier,
    "foreach": several_buffers,
    "numpy": in_numpy,
    "shape of nonzero": counted,
    "length of nonzero": numbered,
    "shape of unique": lambda x: x + x.round().unique().numel(),
    "shape of masked_select": lambda x: x + x.masked_select(x > 0).shape[0],
    "factory of a counted shape": lambda x: x + torch.ones(len((x > 0).nonzero())).sum(),
    "arange of a count": lambda x: x + torch.arange((x > 0).sum()).sum(),
    "linspace": lambda x: x + torch.linspace(0, x.mean().detach(), D),
    "normal": lambda x: x + torch.normal(x.exp(), torch.zeros_like(x)),
    "one_hot": lambda x: x + F.one_hot(x.argmax(-1), D),
    "histogram": lambda x: x + torch.histc(x.detach(), D),
}


def _wanting(tensor: Tensor) -> Tensor:
    tensor.requires_grad = True
    return tensor


@pytest.mark.parametrize("function", OPERATORS_AS_CONSTANTS.values(), ids=OPERATORS_AS_CONSTANTS.keys())
def test_no_operator_passes_for_a_constant(function):
    assert_exact_or_refused(function, X)


INTEGERS = {
    "long": lambda x: x + (10 * x).long(),
    "int, other side": lambda x: (10 * x).int() + x,
    "comparison": lambda x: x + (x > 0),
    "argsort": lambda x: x + x.argsort(-1),
    "subtracted": lambda x: x - x.argsort(-1),
    "sub, alpha": lambda x: torch.sub(x, x.argsort(-1), alpha=2),
    "rsub": lambda x: torch.rsub(x, x.argsort(-1)),
    "cat": lambda x: torch.cat([x, x.argsort(-1)], 1),
    "stack": lambda x: torch.stack([x, x.argsort(-1)], 1),
    "where": lambda x: torch.where(x > 0, x, x.argsort(-1)),
    "masked_fill": lambda x: x.masked_fill(x > 0, x.argmax().double()),
    "masked_fill, whole": lambda x: x.masked_fill(x > 0, x.argmax()),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.argsort(-1).to(x.dtype)),
    "in place": lambda x: (x * 1).add_(x.argsort(-1)),
    "augmented": lambda x: _augmented(x),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), x.argsort(-1)[0].to(x.dtype)),
    "scatter": lambda x: x.scatter(1, torch.zeros(B, 1, D, dtype=torch.long), x.argsort(-1).to(x.dtype)),
    "set item": lambda x: _set_item(x),
    "addcmul": lambda x: torch.addcmul(x, (x > 0).double(), torch.ones(D).double()),
    "bias of linear": lambda x: F.linear(x, WEIGHT, x[0, 0].argsort().to(x.dtype)),
    "lerp": lambda x: x.lerp(x.argsort(-1).to(x.dtype), 0.5),
    "cast of a comparison": lambda x: x + (x > 0).to(x.dtype),
    "sum of a comparison": lambda x: x + (x > 0).sum(-1, keepdim=True),
}


def _augmented(x: Tensor) -> Tensor:
    y = x * 1
    y += x > 0
    return y


def _set_item(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = x.argsort(-1)[:, 0]
    return y


@pytest.mark.parametrize("function", INTEGERS.values(), ids=INTEGERS.keys())
def test_integer_and_boolean_operators_are_operators(function):
    assert_exact_or_refused(function, X)


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda x: torch.where(x > 0, x, 2.0), lambda x, at: torch.where(at > 0, x, 2.0)),
        (lambda x: x * (x > 0), lambda x, at: x * (at > 0)),
        (lambda x: x.gather(1, x.argsort(1)), lambda x, at: x.gather(1, at.argsort(1))),
        (lambda x: x[:, x[0, :, 0].argsort()], lambda x, at: x[:, at[0, :, 0].argsort()]),
        (
            lambda x: x.scatter_add(1, x.argsort(1), x * 2),
            lambda x, at: x.scatter_add(1, at.argsort(1), x * 2),
        ),
        (
            lambda x: x.index_put((torch.zeros(1).long(), x[0, :, :1].argmax(0)), x[0, :1] * 3),
            lambda x, at: x.index_put((torch.zeros(1).long(), at[0, :, :1].argmax(0)), x[0, :1] * 3),
        ),
        (lambda x: x.masked_fill(x < 0, 1.5), lambda x, at: x.masked_fill(at < 0, 1.5)),
    ],
    ids=["where", "mask", "gather", "index", "scatter_add", "index_put", "masked_fill"],
)
def test_places_may_depend_on_the_image(function, held):
    assert_exact(function, X, held)


IMAGE = drawn(1, 4, 3, 3, seed=3)
CHANNEL = drawn(4, seed=4)


def parameter(x: Tensor) -> Tensor:
    """Something for a norm's channels that depends on the image and is held."""
    return x.detach()[0].mean((-2, -1)).exp()


NORMS = {
    "layer norm, bias": lambda x: F.layer_norm(x, x.shape[-1:], None, x.detach()[0, 0, 0].exp()),
    "layer norm, carried weight": lambda x: F.layer_norm(x, x.shape[-1:], x[0, 0, 0]),
    "group norm, bias": lambda x: F.group_norm(x, 2, None, parameter(x)),
    "group norm, carried weight": lambda x: F.group_norm(x, 2, x[0, :, 0, 0]),
    "instance norm, bias": lambda x: F.instance_norm(x, None, None, None, parameter(x)),
    "batch norm, bias": lambda x: F.batch_norm(x, CHANNEL, CHANNEL.exp(), None, parameter(x)),
    "batch norm, mean": lambda x: F.batch_norm(x, parameter(x), CHANNEL.exp()),
    "rms norm, carried weight": lambda x: F.rms_norm(x, x.shape[-1:], x[0, 0, 0]),
}


@pytest.mark.parametrize("function", NORMS.values(), ids=NORMS.keys())
def test_norms_whose_parameters_depend_on_the_image(function):
    assert_exact_or_refused(function, IMAGE)


def test_a_norm_whose_scale_is_an_operator():
    def held(x, at):
        scale = parameter(at)[:, None, None]
        mean, spread = x.mean((2, 3), keepdim=True), at.var((2, 3), unbiased=False, keepdim=True)
        return (x - mean) * (spread + 1e-5).rsqrt() * scale + CHANNEL[:, None, None]

    assert_exact_or_refused(lambda x: F.group_norm(x, 4, parameter(x), CHANNEL), IMAGE, held)
    assert_exact_or_refused(
        lambda x: F.batch_norm(x, CHANNEL, parameter(x), None, None),
        IMAGE,
        lambda x, at: F.batch_norm(x, CHANNEL, parameter(at), None, None),
    )


def test_a_norm_whose_mean_carries():
    assert_exact_or_refused(
        lambda x: F.batch_norm(x, x[0].mean((-2, -1)), CHANNEL.exp()),
        IMAGE,
        lambda x, at: (x - x.mean((-2, -1), keepdim=True)) * (CHANNEL.exp() + 1e-5).rsqrt()[:, None, None],
    )


def test_a_norm_whose_shift_carries():
    assert_exact_or_refused(
        lambda x: F.layer_norm(x, (D,), None, x[0, 0]),
        X,
        lambda x, at: (
            (x - x.mean(-1, keepdim=True)) * (at.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt() + x[0, 0]
        ),
    )


def scale_of(x: Tensor) -> Tensor:
    return x.detach().mean().exp()


FACTORS = {
    "addmm": (
        lambda x: torch.addmm(x[0], drawn(T, 3), drawn(3, D), alpha=1.0),
        lambda x, at: torch.addmm(x[0], drawn(T, 3), drawn(3, D)),
    ),
    "addmm, alpha": (lambda x: torch.addmm(x[0], drawn(T, 3), drawn(3, D), alpha=scale_of(x)), None),
    "addmm, beta": (
        lambda x: torch.addmm(BIAS, x[0], WEIGHT, beta=scale_of(x)),
        None,
    ),
    "addcmul, value": (lambda x: torch.addcmul(x, BIAS, BIAS, value=scale_of(x)), None),
    "addcdiv, value": (lambda x: torch.addcdiv(x, BIAS, BIAS.exp(), value=scale_of(x)), None),
    "baddbmm, alpha": (lambda x: torch.baddbmm(x, drawn(B, T, 3), drawn(B, 3, D), alpha=scale_of(x)), None),
    "add, alpha": (lambda x: torch.add(x, BIAS, alpha=scale_of(x)), None),
    "sub, alpha": (lambda x: torch.sub(x, BIAS, alpha=scale_of(x)), None),
    "index_add, alpha": (
        lambda x: x.index_add(2, torch.arange(D), BIAS.expand(B, T, D), alpha=scale_of(x)),
        None,
    ),
    "add, alpha on a carrier": (
        lambda x: torch.add(BIAS, x, alpha=scale_of(x)),
        lambda x, at: BIAS + scale_of(at) * x,
    ),
    "addcmul of operators": (lambda x: torch.addcmul(x, x.exp(), x.exp()), None),
    "addcmul, operator and carrier": (
        lambda x: torch.addcmul(BIAS, x.exp(), x),
        lambda x, at: BIAS + at.exp() * x,
    ),
    "lerp, operator weight": (lambda x: x.lerp(BIAS.expand_as(x), x.detach().sigmoid()), None),
    "hardtanh, operator bound": (lambda x: F.hardtanh(x, -1.0, scale_of(x)), None),
    "leaky relu": (
        lambda x: F.leaky_relu(x, 0.2),
        lambda x, at: torch.where(at > 0, x, 0.2 * x),
    ),
    "threshold": (lambda x: F.threshold(x, 0.1, 20.0), None),
    "fill": (lambda x: torch.fill(x, x.mean()), lambda x, at: x.mean().expand_as(x)),
    "nan_to_num": (lambda x: torch.nan_to_num(x), lambda x, at: x),
}


@pytest.mark.parametrize(("function", "held"), FACTORS.values(), ids=FACTORS.keys())
def test_factors_of_fused_functions(function, held):
    assert_exact_or_refused(
        lambda x: function(x).reshape(1, -1), X, None if held is None else lambda x, at: held(x, at).reshape(1, -1)
    )


WRITES_BELOW = {
    "data": lambda y: y.data.add_(BIAS),
    "data, slice": lambda y: y.data[:, 0].zero_(),
    "detach": lambda y: y.detach().add_(BIAS),
    "detach, view": lambda y: y.detach().view(-1)[3:].zero_(),
    "detach, set item": lambda y: y.detach().__setitem__(0, 1.0),
    "detach, copy of a carrier": lambda y: y.detach().copy_(y * 2),
    "data, operator": lambda y: y.data.copy_(y.exp()),
    "no_grad": lambda y: _no_grad(y),
    "numpy": lambda y: y.detach().numpy().__imul__(2.0),
}


def _no_grad(y: Tensor) -> None:
    with torch.no_grad():
        y.mul_(y)


@pytest.mark.parametrize("below", WRITES_BELOW.values(), ids=WRITES_BELOW.keys())
def test_writes_below_a_carrier(below):
    assert_exact_or_refused(lambda x: write_below(x, below), X)


def attention(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ x


class TestAttention:
    def test_values_that_broadcast_over_the_batch(self):
        queries = drawn(3, T, D, seed=5)

        def fused(x):
            return F.scaled_dot_product_attention(queries, queries, x).reshape(1, -1)

        def held(x, at):
            return attention(x.expand(3, T, D), queries, queries).reshape(1, -1)

        assert_exact_or_refused(fused, X, held)

    def test_queries_that_broadcast_over_the_batch(self):
        query = drawn(1, T, D, seed=5)
        assert_exact_or_refused(
            lambda x: F.scaled_dot_product_attention(query, x @ WEIGHT, x),
            drawn(3, T, D, seed=1),
            lambda x, at: attention(x, query, at @ WEIGHT),
        )

    def test_values_that_broadcast_over_heads(self):
        queries = drawn(1, 2, T, D, seed=5)
        assert_exact_or_refused(
            lambda x: F.scaled_dot_product_attention(queries, queries, x[:, None]),
            X,
            lambda x, at: attention(x[:, None].expand(B, 2, T, D), queries, queries),
        )

    @pytest.mark.parametrize("mask_shape", [(), (T, T), (1, 3, 1, T, T), (2, 1, 1, T, T)])
    def test_five_dimensions(self, mask_shape):
        mask = drawn(*mask_shape, seed=6) if mask_shape else None
        windows = drawn(2, 3, 2, T, D, seed=7)

        def part(tensor, x):
            return tensor[: len(x)] if tensor is not None and tensor.ndim == 5 else tensor

        def fused(x):
            q = part(windows, x)
            return F.scaled_dot_product_attention(q, q * 2, x[:, None, None].expand_as(q), part(mask, x))

        def held(x, at):
            scores = windows @ (windows * 2).mT / math.sqrt(D)
            return (scores if mask is None else scores + mask).softmax(-1) @ x[:, None, None]

        assert_exact_or_refused(fused, drawn(2, T, D, seed=1), held)

    def test_a_mask_of_fewer_dimensions_for_each_head(self):
        heads = drawn(2, 2, T, D, seed=5)
        mask = drawn(2, T, T, seed=6)

        def fused(x):
            q = heads[: len(x)]
            return F.scaled_dot_product_attention(q, q, x[:, None].expand_as(q), mask)

        def held(x, at):
            return (heads @ heads.mT / math.sqrt(D) + mask).softmax(-1) @ x[:, None]

        assert_exact_or_refused(fused, drawn(2, T, D, seed=1), held)

    @pytest.mark.parametrize("additive", [True, False])
    def test_one_fully_masked_row(self, additive):
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        seen[0] = False
        mask = torch.zeros(T, T, dtype=torch.float64).masked_fill(~seen, -math.inf) if additive else seen

        def fused(x):
            return F.scaled_dot_product_attention(x @ WEIGHT, x, x, mask)

        def held(x, at):
            scores = at @ WEIGHT @ at.mT / math.sqrt(D)
            matrix = torch.zeros_like(scores)
            matrix[:, 1:] = scores.masked_fill(~seen, -math.inf)[:, 1:].softmax(-1)
            return matrix @ x

        if bool(torch.isfinite(fused(X)).all()):
            assert_exact_or_refused(fused, X, held)
        else:
            assert refusal(Tokens(fused), X) is not None

    def test_causal_with_more_keys_than_queries(self):
        query = drawn(B, 3, D, seed=5)
        seen = torch.ones(3, T, dtype=torch.bool).tril()
        assert_exact_or_refused(
            lambda x: F.scaled_dot_product_attention(query, x, x, is_causal=True),
            X,
            lambda x, at: (query @ at.mT / math.sqrt(D)).masked_fill(~seen, -math.inf).softmax(-1) @ x,
        )

    def test_an_input_dependent_mask_is_held(self):
        query = drawn(B, T, D, seed=5)
        assert_exact_or_refused(
            lambda x: F.scaled_dot_product_attention(query, query, x, x @ drawn(D, T)),
            X,
            lambda x, at: (query @ query.mT / math.sqrt(D) + at @ drawn(D, T)).softmax(-1) @ x,
        )


class TestConstantsThatAreMissed:
    """W is right for these; the constants must be counted as well, so that the gap is rounding only."""

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: _assigned(x, lambda y: y.__setitem__((slice(None), 0), 3.0)),
            lambda x: _assigned(x, lambda y: y.__setitem__((slice(None), 0), BIAS)),
            lambda x: _assigned(x, lambda y: y.__setitem__((slice(None), 0), y[:, 1] + 2)),
            lambda x: _assigned(x, lambda y: y[:, 1].fill_(2.0)),
            lambda x: _assigned(x, lambda y: y.fill_diagonal_(2.0)),
            lambda x: _assigned(x, lambda y: y[:, 1].copy_(BIAS)),
            lambda x: _assigned(x, lambda y: y[:, 1:3].add_(BIAS)),
            lambda x: _assigned(x, lambda y: y.masked_fill_(drawn(T, D) > 0, 2.0)),
            lambda x: _assigned(x, lambda y: y.index_fill_(1, torch.tensor([0, 2]), 2.0)),
            lambda x: torch.constant_pad_nd(x, (1, 2), 3.0),
            lambda x: F.pad(x, (1, 2), "constant", 3.0),
            lambda x: _into_constant(x),
            lambda x: torch.ops.aten.constant_pad_nd(x, (1, 2), 3.0),
            lambda x: x.new_full((B, 1, D), 2.0)[: len(x)] + x,
            lambda x: torch.cat([torch.ones(len(x), 1, D).double(), x], 1),
            lambda x: torch.index_fill(x, 1, torch.tensor([0, 2]), 2.0),
            lambda x: torch.select_scatter(x, BIAS.expand(len(x), D), 1, 0),
            lambda x: torch.diagonal_scatter(x, torch.ones(len(x), T).double(), 0, 1, 2),
            lambda x: x.clone().put_(torch.tensor([0, 1]), torch.tensor([2.0, 3.0]).double()),
        ],
    )
    def test_the_gap_is_rounding(self, function):
        model = Tokens(function)
        if refusal(model, X) is None:
            assert conservation_gap(model, X, 3) < 1e-9

    def test_what_is_overwritten_carries_nothing(self):
        weight = effective_transformation(Tokens(lambda x: _assigned(x, lambda y: y.__setitem__((0, 0, 3), 9.0))), X, 3)
        assert not weight.any()


def _assigned(x: Tensor, assign) -> Tensor:
    y = x * 1.0
    assign(y)
    return y


def _into_constant(x: Tensor) -> Tensor:
    y = torch.ones_like(x)
    y[:, 2:] = x[:, 2:]
    return y


class TestDiff:
    @pytest.mark.parametrize("options", [{}, {"n": 2}, {"dim": 1}])
    def test_without_ends(self, options):
        assert_exact(lambda x: torch.diff(x, **options), X, lambda x, at: torch.diff(x, **options))

    def test_constant_ends(self):
        end = drawn(1, T, 1)
        assert_exact_or_refused(
            lambda x: torch.diff(x, prepend=end, append=end),
            X,
            lambda x, at: torch.diff(x, prepend=end, append=end),
        )

    @pytest.mark.parametrize("end", ["prepend", "append"])
    def test_carried_and_frozen_ends(self, end):
        assert_exact_or_refused(
            lambda x: torch.diff(x, **{end: x[..., :1] * 2}), X, lambda x, at: torch.diff(x, **{end: x[..., :1] * 2})
        )
        assert_exact_or_refused(lambda x: torch.diff(x, **{end: x[..., :1].exp()}), X)


class TestWeightsMadeBeforeTheCall:
    def test_a_computed_weight_is_no_carrier(self):
        weight = nn.Parameter(WEIGHT) * 2.0
        assert_exact_or_refused(lambda x: x @ weight, X, lambda x, at: x @ weight.detach())
        assert_exact_or_refused(
            lambda x: F.linear(x, weight, weight[0]), X, lambda x, at: F.linear(x, weight.detach(), weight.detach()[0])
        )
        assert_exact_or_refused(lambda x: x + weight[0], X, lambda x, at: x + weight.detach()[0])

    def test_weights_computed_inside_are_constants(self):
        weight = nn.Parameter(WEIGHT)
        assert_exact(lambda x: x @ (weight / weight.norm()), X, lambda x, at: x @ (WEIGHT / WEIGHT.norm()))


class TestOnePrecedenceRule:
    """Two spellings of one function give one map, or are refused alike."""

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (lambda x: F.linear(F.gelu(x), WEIGHT.T) * x, lambda x: (F.gelu(x) @ WEIGHT) * x),
            (lambda x: F.gelu(x).sum(-1, keepdim=True) * x, lambda x: (F.gelu(x) @ torch.ones(D, 1).double()) * x),
            (lambda x: F.linear(F.gelu(x), WEIGHT.T) * x, lambda x: torch.einsum("btd,de->bte", F.gelu(x), WEIGHT) * x),
            (lambda x: F.gelu(x) * BIAS * x, lambda x: torch.mul(BIAS, F.gelu(x)) * x),
            (lambda x: F.gelu(x).mul(x), lambda x: x * F.gelu(x)),
            (lambda x: (x @ WEIGHT) * F.silu(x), lambda x: torch.addcmul(torch.zeros_like(x), x @ WEIGHT, F.silu(x))),
            (lambda x: torch.square(F.relu(x)), lambda x: F.relu(x) ** 2),
            (lambda x: torch.square(F.relu(x)), lambda x: F.relu(x).pow(2)),
            (lambda x: F.linear(F.silu(x), x[0]), lambda x: F.silu(x) @ x[0].T),
            (lambda x: F.linear(x, F.silu(x[0])), lambda x: x @ F.silu(x[0]).T),
            (lambda x: x.div(2.0), lambda x: x * 0.5),
            (lambda x: torch.addcdiv(BIAS.expand_as(x), x, BIAS.exp()), lambda x: BIAS + x / BIAS.exp()),
            (
                lambda x: torch.addmm(BIAS, F.gelu(x[0]), WEIGHT)[None] * x[:1],
                lambda x: (F.gelu(x[:1]) @ WEIGHT + BIAS) * x[:1],
            ),
        ],
    )
    def test_spellings_agree(self, left, right):
        verdicts = [refusal(Tokens(side), X) is None for side in (left, right)]
        assert verdicts[0] == verdicts[1]
        if all(verdicts):
            torch.testing.assert_close(
                effective_transformation(Tokens(left), X, 7), effective_transformation(Tokens(right), X, 7)
            )


def test_a_constant_that_is_written_later_is_still_seen():
    """The buffer of the model keeps what an earlier image left there."""

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(D, dtype=torch.float64))

        def forward(self, x):
            self.last.copy_(x.detach()[0, 0])
            return (x + self.last).flatten(1)

    assert_exact_or_refused(Remembers(), X)


class CachesBiases(nn.Module):
    """Biases that are looked up once and kept, as LeViT and EfficientFormer do in evaluation mode."""

    def __init__(self, keep) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
        self.keep, self.kept = keep, None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.keep(self.biases, x)
        return ((x @ x.mT + self.kept).softmax(-1) @ x).flatten(1)


def test_a_cache_of_parameters_is_a_constant():
    """A call with gradients leaves a function of parameters behind, which is no carrier of the image."""
    model, fresh = (CachesBiases(lambda biases, x: biases[:5] * 2) for _ in range(2))
    model(X)
    assert model.kept.requires_grad
    torch.testing.assert_close(effective_transformation(model, X, 1), effective_transformation(fresh, X, 1))


def test_a_cache_of_an_earlier_image_is_refused():
    model = CachesBiases(lambda biases, x: biases[:5] * x.mean())
    model(X.clone().requires_grad_())
    with pytest.raises(UnsupportedOperator, match="outside the interception"):
        effective_transformation(model, X, 1)


def test_parameters_times_the_image_out_of_sight_are_refused():
    """The graph ends in parameters alone, but the numbers are those of the image."""
    layer = nn.Linear(D, D, dtype=torch.float64)

    def switched_off(x):
        with torch._C.DisableTorchFunction():
            scale = layer(x.detach())
        return x * scale.sigmoid()

    model = Tokens(switched_off)
    model.layer = layer
    assert refusal(model, X) is not None
