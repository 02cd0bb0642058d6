"""Small random programs, and the oracle that says what their map is, without the engine.

A program is a list of instructions, each a line or two of Python. The oracle knows of each instruction only what the
documentation says of it: which of its arguments carry and which are held. It runs a program twice. The first time it
records the value of every register. The second time the carriers are plain autograd tensors and every operator is the
recorded one, so that the program is affine in its input and W is its ordinary gradient.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

B, T, D = 2, 4, 6


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.7


CONSTANTS: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "D": D,
    "W": drawn(D, D, seed=10),
    "b": drawn(D, seed=11),
    "K": drawn(D, D, 3, seed=12),
    "P": drawn(1, T, D, seed=13),
    "M": drawn(T, D, seed=14) > 0,
    "order": torch.tensor([2, 0, 3, 1]),
    "qkv": drawn(3 * D, D, seed=15),
    "qkv_b": drawn(3 * D, seed=16),
}
W, BIAS, KERNEL, MASK, ORDER = (CONSTANTS[name] for name in ("W", "b", "K", "M", "order"))
QKV, QKV_BIAS = CONSTANTS["qkv"].chunk(3), CONSTANTS["qkv_b"].chunk(3)


class State(enum.Enum):
    CONSTANT = "constant"
    CARRIER = "carrier"
    GATE = "carrier, an activation's output"
    OPERATOR = "operator"


CARRYING = (State.CARRIER, State.GATE)


@dataclass(frozen=True)
class Value:
    """A register: its state, the recorded value, and the one that carries in the replay."""

    state: State
    at: Tensor
    live: Tensor

    @property
    def carries(self) -> bool:
        return self.state in CARRYING

    @property
    def depends(self) -> bool:
        return self.state is not State.CONSTANT


Outcome = tuple[State, Tensor | None]
"""State of a result, and the result in the replay; None where the recorded value is held."""
Semantics = Callable[..., Outcome]


@dataclass(frozen=True)
class Operation:
    """One kind of instruction.

    Attributes:
        source: Python, with ``{o}`` for the result and ``{a}``, ``{b}``, ``{c}`` for the arguments.
        kinds: of the arguments.
        gives: kind of the result.
        means: what the oracle makes of it.
        covered: whether the engine promises to take it wherever the result carries.
    """

    source: str
    kinds: str
    gives: str
    means: Semantics
    covered: bool = True


@dataclass(frozen=True)
class Instruction:
    operation: Operation
    result: str
    arguments: tuple[str, ...]

    @property
    def source(self) -> str:
        return self.operation.source.format(o=self.result, **dict(zip("abc", self.arguments, strict=False)))


@dataclass(frozen=True)
class Program:
    """Instructions; the last tokens made are the result."""

    instructions: tuple[Instruction, ...]
    result: str

    def __repr__(self) -> str:
        lines = [line for i in self.instructions for line in i.source.split("\n")]
        return "\n".join(
            [
                "",
                "def forward(x):",
                "    c = P.expand_as(x).clone()",
                *(f"    {line}" for line in lines),
                f"    return {self.result}",
            ]
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001
        printer.text(repr(self))  # hypothesis would print the fields

    @property
    def covered(self) -> bool:
        return all(i.operation.covered for i in self.instructions)

    def function(self) -> Callable[[Tensor], Tensor]:
        names: dict[str, Any] = dict(CONSTANTS)
        exec(repr(self), names)  # the text that a failure prints is what ran
        return names["forward"]


class Oracle:
    """A program's states and values at one input, and its replay with the operators held."""

    def __init__(self, program: Program, x: Tensor) -> None:
        self.program = program
        self.at: dict[str, Tensor] = {"x": x, "c": CONSTANTS["P"].expand_as(x).clone()}
        with torch.no_grad():
            for instruction in program.instructions:
                names = {**CONSTANTS, **{name: self.at[name].clone() for name in instruction.arguments}}
                exec(instruction.source, names)
                self.at[instruction.result] = names[instruction.result].detach()

    def replay(self, x: Tensor) -> Value:
        """The result for another input, all operators as recorded."""
        values = {"x": Value(State.CARRIER, self.at["x"], x), "c": Value(State.CONSTANT, self.at["c"], self.at["c"])}
        for i in self.program.instructions:
            state, live = i.operation.means(*(values[name] for name in i.arguments))
            at = self.at[i.result]
            values[i.result] = Value(state, at, at if live is None else live)
        return values[self.program.result]

    @property
    def finite(self) -> bool:
        return all(
            bool(t.isfinite().all()) and float(t.abs().max()) < 1e3 for t in self.at.values() if t.is_floating_point()
        )


@st.composite
def programs(draw: st.DrawFn, operations: Sequence[Operation], longest: int = 7) -> Program:
    """Programs of a few instructions; shorter ones first, so that failures shrink to what matters."""
    steps = draw(
        st.lists(st.tuples(st.sampled_from(operations), *[st.integers(0, 3)] * 3), min_size=1, max_size=longest)
    )
    kinds: dict[str, list[str]] = {"x": ["c", "x"]}
    instructions = []
    for number, (operation, *choices) in enumerate(steps):
        if any(kind not in kinds for kind in operation.kinds):
            continue
        arguments = tuple(
            kinds[kind][-1 - choice % len(kinds[kind])] for kind, choice in zip(operation.kinds, choices, strict=False)
        )
        name = f"v{number}"
        instructions.append(Instruction(operation, name, arguments))
        kinds.setdefault(operation.gives, []).append(name)
    return Program(tuple(instructions), kinds["x"][-1])
