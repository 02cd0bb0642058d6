"""Figure 3 of the paper, computed: a layer whose derivative is mostly the variation of its own operator (eq. (3))."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.analysis.base import analysis, flag
from dave_vit.engine.gradient import effective_transformation
from dave_vit.viz import Drawing
from dave_vit.viz.plots import create_plots
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section

TOKENS = 8
GAIN = 2.5
STEP = 0.02
_SIZE = 2 * TOKENS  # numbers in and out
_LOOK = (math.cos(math.pi / 6), math.sin(math.pi / 6))  # the direction of a token that attention looks at


class ToyAttention(nn.Module):
    """One head of self-attention over tokens of two numbers; queries and keys see one direction: [B,2t] -> [B,2t].

    Args:
        gain: of queries and keys; the larger, the faster the attention matrix turns with the input.
    """

    def __init__(self, gain: float = GAIN) -> None:
        super().__init__()
        self.gain = gain
        self.register_buffer("look", torch.tensor(_LOOK, dtype=torch.float64)[:, None])  # [2,1]

    look: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        tokens = x.unflatten(1, (-1, 2))[:, None]  # [B,1,t,2]
        looks = self.gain * (tokens @ self.look)  # queries and keys: [B,1,t,1]
        return F.scaled_dot_product_attention(looks, looks, tokens, scale=1.0).flatten(1)

    def mixing(self, x: Tensor) -> Tensor:
        """The attention matrix of one input: [2t] -> [t,t]."""
        looks = self.gain * (x.view(-1, 2) @ self.look)
        return torch.softmax(looks @ looks.T, dim=1)


@dataclass(frozen=True)
class Operators:
    """The three operators of eq. (3) at one input, as matrices [2t,2t]."""

    derivative: Tensor
    effective: Tensor
    variation: Tensor


def operators(layer: ToyAttention, x: Tensor) -> Operators:
    """Each operator computed on its own: none is taken as the difference of the others.

    Args:
        layer: whose derivative is split.
        x: [2t], in float64.
    """
    every = torch.arange(len(x))[None]  # all outputs as targets: [1,2t]
    derivative = torch.autograd.functional.jacobian(lambda one: layer(one[None])[0], x)
    effective = effective_transformation(layer, x[None], every)[0]  # L(X)
    tokens = x.view(-1, 2)
    variation = torch.autograd.functional.jacobian(lambda one: (layer.mixing(one) @ tokens).flatten(), x)  # D L(.) X
    return Operators(derivative, effective, variation)


def signal(tokens: int = TOKENS) -> Tensor:
    """A smooth input, which varies little where attention looks and much across it: [2t]."""
    at = torch.linspace(0, 2 * math.pi, tokens, dtype=torch.float64)
    along, across = torch.tensor(_LOOK, dtype=torch.float64), torch.tensor((-_LOOK[1], _LOOK[0]), dtype=torch.float64)
    return (0.4 * torch.sin(at)[:, None] * along + 2.5 * torch.cos(at)[:, None] * across).flatten()


def perturbation(tokens: int = TOKENS, seed: int = 0, size: float = STEP) -> Tensor:
    """A small random step of a given length relative to that of the signal: [2t]."""
    step = torch.randn(2 * tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return step * (size * float(signal(tokens).norm() / step.norm()))


_NAMES = {
    "derivative": "layer derivative",
    "effective": "effective transformation",
    "variation": "operator variation",
}


@dataclass(frozen=True)
class ToyOptions:
    """Options of the analysis.

    Attributes:
        gain: of queries and keys.
        step: its length relative to that of the input.
        seed: of the step.
    """

    gain: float = flag(GAIN, "Of queries and keys.")
    step: float = flag(STEP, "Length of the step, relative to the input.")
    seed: int = 0


@analysis("toy")
def analyze_toy_layer(options: ToyOptions) -> Section:
    """A layer whose derivative is mostly the variation of its own operator (figure 3)."""
    layer, x = ToyAttention(options.gain).eval(), signal()
    here, there = (operators(layer, at) for at in (x, x + perturbation(seed=options.seed, size=options.step)))
    rows: list[dict[str, Number]] = []
    for name, words in _NAMES.items():
        before, after = getattr(here, name), getattr(there, name)
        norm, change = float(before.norm()), float((after - before).norm())
        rows.append({"operator": words, "norm": norm, "change": change, "relative change": change / norm})
    gap = float((here.derivative - here.effective - here.variation).abs().max())
    facts = {"tokens": TOKENS, "gain": options.gain, "step": f"{options.step:.0%} of the input", "seed": options.seed}
    ratio = {name: float(rows[2][name] or 0) / float(rows[1][name] or 1) for name in ("norm", "change")}
    text = (
        f"A single head of self-attention over {TOKENS} tokens of two numbers. All three matrices are computed "
        f"independently of each other; derivative = effective + variation holds to {gap:.0e}. The norm of the "
        f"variation is {ratio['norm']:.1f} times that of the effective transformation, and after a step of "
        f"{options.step:.0%} of the input it has changed {ratio['change']:.1f} times as much: the derivative shows the "
        "operator's variation and hides what the layer does."
    )
    cells = tuple(
        (str(row["operator"]), f"{row['norm']:.2f}", f"{row['change']:.2f}", f"{_relative(row):.1%}") for row in rows
    )
    table = ReportTable(("operator", "norm", "norm of the change", "relative change"), cells)
    caption = "Rows: the operators. Columns: at the input, after a small step, and the change. One scale for all."
    picture = ReportFigure("toy", figure(here, there), caption)
    return Section("toy", "Operator variation in a small layer (figure 3)", text, facts, [table], rows, [picture])


def _relative(row: dict[str, Number]) -> float:
    return float(row["relative change"] or 0.0)


def figure(here: Operators, there: Operators) -> Drawing:
    """Three rows of matrices, all in one colour scale."""
    drawing, _ = create_plots(1, width=7.4, height=6.9)
    drawing.clear()
    grid = drawing.subplots(3, 3)
    limit = float(max(here.derivative.abs().max(), there.derivative.abs().max()))
    shown: Any = None
    for row, (name, words) in zip(grid, _NAMES.items(), strict=True):
        before, after = getattr(here, name), getattr(there, name)
        heads = ("at the input X", "at X + a small step", "change")
        for column, (axes, values) in enumerate(zip(row, (before, after, after - before), strict=True)):
            shown = axes.imshow(values.numpy(), cmap="dave_signed", vmin=-limit, vmax=limit)
            axes.set_xticks([0, _SIZE - 1], ["1", str(_SIZE)], fontsize=8)
            axes.set_yticks([0, _SIZE - 1], ["1", str(_SIZE)], fontsize=8)
            note = f"{heads[column]}\n" if name == "derivative" else ""
            axes.set_title(f"{note}norm {float(values.norm()):.2f}", fontsize=9)
            axes.set_xlabel("input" if name == "variation" else "", fontsize=8)
        row[0].set_ylabel(f"{words}\noutput", fontsize=9)
    drawing.colorbar(shown, ax=list(grid.flat), shrink=0.6, label="entry of the matrix")
    return drawing
