"""Random programs come out exact against an oracle that knows nothing of the engine, or are refused."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings

from dave_vit import effective_transformation
from dave_vit.engine.gradient import compute_balances
from dave_vit.errors import DaveError
from exactness import TOLERANCE, Tokens
from program_vocabulary import OPERATIONS
from programs import CARRYING, B, D, Instruction, Oracle, Program, T, drawn, programs

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct")
SEED = int(os.environ.get("DAVE_PROGRAMS_SEED", "1"))  # others are tried by hand, see docs/reliability.md
MANY = int(os.environ.get("DAVE_PROGRAMS", "1000"))
X = drawn(B, T, D, seed=3)
TARGET = 8
_LAX = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


def check(program: Program) -> str:
    """What became of it: "exact", "refused", or "too large" to be compared."""
    oracle = Oracle(program, X)
    if not oracle.finite:
        return "too large"
    leaf = X.clone().requires_grad_()
    result = oracle.replay(leaf)
    carries = result.state in CARRYING
    if carries:
        assert_affine(oracle, result.live.detach())
    model = Tokens(program.function())
    try:
        weight = effective_transformation(model, X, TARGET)
    except DaveError:
        if carries and program.covered and result.live.requires_grad:
            raise
        return f"refused, {'carries' if carries else 'no carrier'}"
    assert carries, "accepted, though the result is no carrier"
    score = result.live.flatten(1)[:, TARGET].sum() + 0 * leaf.sum()
    expected = torch.autograd.grad(score, leaf)[0]
    torch.testing.assert_close(weight, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for balance in compute_balances(model, X, TARGET):
        size = max(abs(balance.score), abs(balance.explained))
        # Values stay below 1e3; a score out of which they cancel (lerp(x, x) - x) keeps their rounding.
        assert balance.residual < 1e-7 * size + 1e-10
    return "exact"


def assert_affine(oracle: Oracle, at: torch.Tensor) -> None:
    """The oracle's own replay: the recorded result at the recorded input, and affine around it."""
    torch.testing.assert_close(at, oracle.at[oracle.program.result], rtol=1e-9, atol=1e-9)
    step = drawn(B, T, D, seed=4)
    once, twice = (oracle.replay(X + scale * step).live for scale in (1, 2))
    torch.testing.assert_close(twice - at, 2 * (once - at), rtol=1e-8, atol=1e-8)


@seed(0)
@settings(max_examples=100, **_LAX)
@given(programs(OPERATIONS))
def test_a_hundred_programs(program):
    check(program)


@pytest.mark.slow
def test_thousands_of_programs():
    print(f"DAVE_PROGRAMS_SEED={SEED}")
    counts: dict[str, int] = {}

    @seed(SEED)
    @settings(max_examples=MANY, **_LAX)
    @given(programs(OPERATIONS, longest=10))
    def run(program):
        note(f"DAVE_PROGRAMS_SEED={SEED}")
        verdict = check(program)
        counts[verdict] = counts.get(verdict, 0) + 1

    run()
    print(counts)
    assert counts["exact"] > MANY / 10


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.source)
def test_every_instruction_alone(operation):
    """On the image, on a gate, on an operator: so that no instruction is left to chance."""
    kinds = {
        "x": ["x", "v_gate", "v_frozen", "c"],
        "m": ["v_matrix"],
        "s": ["v_scale"],
        "t": ["v_mask"],
        "i": ["v_places"],
        "n": ["v_whole"],
    }
    made = {operation.source: operation for operation in reversed(OPERATIONS)}
    prologue = tuple(
        Instruction(made[source], name, ("x", "x")[: len(made[source].kinds)])
        for name, source in {
            "v_gate": "{o} = F.gelu({a})",
            "v_frozen": "{o} = torch.exp(0.3 * {a})",
            "v_matrix": "{o} = ({a} @ {b}.mT).softmax(-1)",
            "v_scale": "{o} = 1 + {a}.norm(dim=-1, keepdim=True)",
            "v_mask": "{o} = {a} < 0.2",
            "v_places": "{o} = {a}.argsort(1)",
            "v_whole": "{o} = (3 * {a}).long()",
        }.items()
    )
    if operation.gives != "x":
        return
    choices = [kinds[kind] for kind in operation.kinds]
    given = {
        tuple(c[(shift + turn * k) % len(c)] for k, c in enumerate(choices)) for shift in range(4) for turn in (0, 1)
    }
    for arguments in sorted(given):
        last = Instruction(operation, "v_last", arguments)
        needed = tuple(i for i in prologue if i.result in arguments)
        scaled = Instruction(made["{o} = {a} * {b}"], "v_scaled", ("x", "v_last"))
        shifted = Instruction(made["{o} = {a} + {b}"], "v_shifted", ("v_scaled", "v_last"))
        check(Program((*needed, last), "v_last"))
        check(Program((*needed, last, scaled, shifted), "v_shifted"))
