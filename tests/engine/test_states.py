"""One rule says what comes out where tensors of several states meet, whatever the spelling."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit import conservation_gap, effective_transformation
from dave_vit.engine.states import State, mixed_state, product_state, sum_state
from dave_vit.errors import UnsupportedOperator

CONSTANT, CARRIER, GATE, OPERATOR = State
D = 4
W = torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Fn(nn.Module):
    """A function of two halves [T, D] of the input; its output, flattened, is the logits."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*x[0].chunk(2)).reshape(1, -1)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, 6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("factors", "state"),
    [
        ([CONSTANT, CONSTANT], CONSTANT),
        ([CONSTANT, OPERATOR], OPERATOR),
        ([CARRIER, CONSTANT], CARRIER),
        ([CARRIER, OPERATOR], CARRIER),
        ([CARRIER, GATE], CARRIER),
        ([CARRIER, GATE, GATE], CARRIER),
        ([GATE, CONSTANT], GATE),
        ([GATE, OPERATOR], GATE),
        ([CARRIER, CARRIER], OPERATOR),
        ([CARRIER, CARRIER, GATE], OPERATOR),
        ([GATE, GATE], OPERATOR),
    ],
)
def test_products(factors, state):
    assert {product_state(order) for order in itertools.permutations(factors)} == {state}


@pytest.mark.parametrize(
    ("terms", "state"),
    [
        ([CONSTANT, CONSTANT], CONSTANT),
        ([CARRIER, CONSTANT], CARRIER),
        ([GATE, CONSTANT], GATE),
        ([GATE, GATE], CARRIER),
        ([CARRIER, GATE], CARRIER),
        ([CARRIER, OPERATOR], OPERATOR),
        ([CONSTANT, OPERATOR], OPERATOR),
    ],
)
def test_sums(terms, state):
    assert {sum_state(order) for order in itertools.permutations(terms)} == {state}


def test_only_gates_are_changed_by_mixing():
    assert [mixed_state(state) for state in State] == [CONSTANT, CARRIER, CARRIER, OPERATOR]


# a @ b^T for tokens a [T, D] and b [S, D], in every spelling
MATRIX_PRODUCTS = {
    "linear": F.linear,
    "matmul": lambda a, b: torch.matmul(a, b.mT),
    "@": lambda a, b: a @ b.mT,
    "mm": lambda a, b: a.mm(b.t()),
    "bmm": lambda a, b: torch.bmm(a[None], b.mT[None])[0],
    "einsum": lambda a, b: torch.einsum("td,sd->ts", a, b),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=([1], [1])),
    "inner": torch.inner,
    "addmm": lambda a, b: torch.addmm(torch.zeros(1, dtype=a.dtype), a, b.mT),
    "baddbmm": lambda a, b: torch.baddbmm(torch.zeros(1, 1, 1, dtype=a.dtype), a[None], b.mT[None])[0],
    "conv1d": lambda a, b: F.conv1d(a.mT[None], b[..., None])[0].mT,
    "conv2d": lambda a, b: F.conv2d(a.mT[None, ..., None], b[..., None, None])[0, ..., 0].mT,
    "mul and sum": lambda a, b: (a[:, None] * b).sum(-1),
}
# a * b elementwise
SCALINGS = {
    "*": lambda a, b: a * b,
    "mul": torch.mul,
    "mul_": lambda a, b: a.clone().mul_(b),
    "einsum": lambda a, b: torch.einsum("td,td->td", a, b),
    "addcmul": lambda a, b: torch.addcmul(torch.zeros(1, dtype=a.dtype), a, b),
}
# What the product meets: (first factor, second factor, what is done with the product).
PROGRAMS = {
    "gate, constant, then a carrier": lambda f: lambda a, b: f(F.gelu(a), W[:3]).sum() * b,
    "gate, constant, then a gate": lambda f: lambda a, b: f(F.gelu(a), W[:3]).sum() * F.silu(b),
    "gate, constant, then a power": lambda f: lambda a, b: b + f(F.relu(a), W[:3]).sum() ** 2,
    "gate, carrier": lambda f: lambda a, b: f(F.gelu(a), b),
    "carrier, gate": lambda f: lambda a, b: f(a, F.gelu(b)),
    "gate, gate": lambda f: lambda a, b: f(F.gelu(a), F.silu(b)),
    "carrier, carrier": lambda f: lambda a, b: f(a, b),
    "carrier, carrier, then a softmax": lambda f: lambda a, b: f(a, b).softmax(-1) @ b[:, :3],
    "operator, carrier": lambda f: lambda a, b: f(a.sigmoid(), b),
}


def outcome(function, x: Tensor) -> Tensor | str:
    model = Fn(function)
    try:
        weight = effective_transformation(model, x, 1)
    except UnsupportedOperator:
        return "refused"
    assert conservation_gap(model, x, 1) < 1e-12
    return weight


def agree(actual: Tensor | str, expected: Tensor | str) -> None:
    assert isinstance(actual, str) == isinstance(expected, str)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("spelling", MATRIX_PRODUCTS)
def test_spellings_of_a_matrix_product_agree(spelling, program, x):
    wrapped = PROGRAMS[program]
    agree(outcome(wrapped(MATRIX_PRODUCTS[spelling]), x), outcome(wrapped(torch.inner), x))


ELEMENTWISE = {
    "gate, constant, then a carrier": lambda f: lambda a, b: f(F.gelu(a), W[:3]) * b,
    "gate, constant, then a gate": lambda f: lambda a, b: b + f(F.gelu(a), W[:3]) * F.silu(b),
    "gate, constant, then a power": lambda f: lambda a, b: f(F.relu(a), W[:3]) ** 2,
    "gate, carrier": lambda f: lambda a, b: f(F.gelu(a), b),
    "carrier, gate": lambda f: lambda a, b: f(a, F.gelu(b)),
    "gate, gate": lambda f: lambda a, b: f(F.gelu(a), F.silu(b)),
    "carrier, carrier": lambda f: lambda a, b: f(a, b),
}


@pytest.mark.parametrize("program", ELEMENTWISE)
@pytest.mark.parametrize("spelling", SCALINGS)
def test_spellings_of_an_elementwise_product_agree(spelling, program, x):
    wrapped = ELEMENTWISE[program]
    agree(outcome(wrapped(SCALINGS[spelling]), x), outcome(wrapped(torch.mul), x))


class TestPrecedence:
    def test_a_gate_is_held_by_a_carrier(self, x):
        weight = outcome(lambda a, b: b * (2 * F.gelu(a)), x)
        assert weight[0, 3, 1] == pytest.approx(float(2 * F.gelu(x[0, 0, 1])))
        assert weight[0, :3].abs().max() == 0

    def test_what_was_mixed_is_no_gate_any_more(self, x):
        weight = outcome(lambda a, b: F.linear(F.gelu(a), W) * F.gelu(b), x)
        assert weight[0, 0].abs().min() > 0  # through the linear layer
        assert weight[0, 3:].abs().max() == 0  # the other one is the gate

    def test_an_in_place_sum_makes_a_gate_a_carrier(self, x):
        def program(a: Tensor, b: Tensor) -> Tensor:
            gate = F.gelu(a)
            gate += a
            return gate * F.gelu(b)

        agree(outcome(program, x), outcome(lambda a, b: (F.gelu(a) + a) * F.gelu(b), x))


def _into_zeros(decay, state, new):
    return torch.zeros_like(new).add_(state).mul_(decay) + new


# One step of a scan from tokens [T, D]: a state, zero at first, decays by an operator and takes in what is new.
SCANS = {
    "*": lambda decay, state, new: decay * state + new,
    "keywords": lambda decay, state, new: torch.mul(input=state, other=decay) + new,
    "addcmul": lambda decay, state, new: torch.addcmul(new, decay, state),
    "div": lambda decay, state, new: state / (1 / decay) + new,
    "matmul": lambda decay, state, new: (torch.diag_embed(decay) @ state[:, None])[:, 0] + new,
    "linear": lambda decay, state, new: F.linear(state, torch.diag_embed(decay)) + new,
    "views": lambda decay, state, new: (decay[None] * state.clone().expand(2, D))[0] + new,
    "in place": lambda decay, state, new: state.clone().mul_(decay) + new,
}
STARTS = {
    "zeros": lambda like: torch.zeros(D, dtype=like.dtype),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda like: like.new_zeros(D),
    "full": lambda like: torch.full((D,), 0.0, dtype=like.dtype),
    "full, keyword": lambda like: torch.full(size=(D,), fill_value=0, dtype=like.dtype),
    "full_like": lambda like: torch.full_like(like, 0),
    "zero_": lambda like: torch.ones(D, dtype=like.dtype).zero_(),
    "fill_": lambda like: torch.ones(D, dtype=like.dtype).fill_(0.0),
    "tensor": lambda like: torch.tensor([0.0] * D, dtype=like.dtype),
    "stack": lambda like: torch.stack([torch.zeros((), dtype=like.dtype)] * D),
    "number": lambda like: 0,
}


def scan(step, start):
    def run(a, b):
        decay, state = (a @ W).sigmoid(), start(a[0])
        for token in range(len(a)):
            state = step(decay[token], state, decay[token] * a[token])
        return state * F.silu(b[0])

    return run


@pytest.mark.parametrize(
    ("step", "start"),
    [*((step, "zeros") for step in SCANS), *(("*", start) for start in STARTS)],
)
def test_a_state_that_starts_with_zeros_carries(step, start, x):
    """A zero times an operator is a constant, so that the state is what it would be without it."""

    def without_zeros(a, b):
        return scan(SCANS["*"], lambda like: (a @ W).sigmoid()[0] * a[0])(a[1:], b)

    agree(outcome(scan(SCANS[step], STARTS[start]), x), outcome(without_zeros, x))


def set_first_row(state):
    state[0] = 1.0
    return state


@pytest.mark.parametrize(
    "write",
    [set_first_row, lambda state: state.fill_(value=1.0), lambda state: state.new_full(size=(D,), fill_value=1.0)],
    ids=["item", "fill_", "new_full"],
)
def test_zeros_that_were_written_to_are_no_zeros(write, x):
    assert outcome(lambda a, b: write(torch.zeros_like(a)) * a.sigmoid() + b, x) == "refused"
