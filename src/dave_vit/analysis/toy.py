"""Figure 3 of the paper, computed: a layer whose derivative is mostly the variation of its own operator (eq. (3))."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit.analysis.inputs import analysis, flag
from dave_vit.engine.gradient import effective_transformation
from dave_vit.viz.figures import Drawing
from dave_vit.viz.report_section import Number, ReportFigure, ReportTable, Section

TOKENS = 8
GAIN = 2.5
STEP = 0.02
_SIZE = 2 * TOKENS  # numbers in and out
_DIRECTION = (math.cos(math.pi / 6), math.sin(math.pi / 6))  # queries and keys are the component of tokens along it
_TITLES = ("layer derivative", "effective transformation", "operator variation")


class ToyAttention(nn.Module):
    """One head of self-attention over tokens of two numbers; queries and keys see one direction: [B,2t] -> [B,2t].

    Args:
        gain: scale of queries and keys; the larger, the faster the attention matrix changes with the input.
    """

    def __init__(self, gain: float = GAIN) -> None:
        super().__init__()
        self.gain = gain
        self.direction = torch.tensor(_DIRECTION, dtype=torch.float64)[:, None]  # [2,1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        tokens = x.unflatten(1, (-1, 2))[:, None]  # [B,1,t,2]
        keys = self.gain * (tokens @ self.direction)  # also the queries: [B,1,t,1]
        return F.scaled_dot_product_attention(keys, keys, tokens, scale=1.0).flatten(1)

    def mixing(self, x: Tensor) -> Tensor:
        """Return the attention matrix of one input: [2t] -> [t,t]."""
        keys = self.gain * (x.view(-1, 2) @ self.direction)
        return torch.softmax(keys @ keys.T, dim=1)


class Operators(NamedTuple):
    """The three operators of eq. (3) at one input, as matrices [2t,2t]."""

    derivative: Tensor
    effective: Tensor
    variation: Tensor


def operators(layer: ToyAttention, x: Tensor) -> Operators:
    """Compute each operator independently: none is taken as the difference of the others.

    Args:
        layer: layer whose derivative is split.
        x: [2t], in float64.
    """
    every = torch.arange(len(x))[None]  # all outputs as targets: [1,2t]
    derivative = torch.autograd.functional.jacobian(lambda one: layer(one[None])[0], x)
    effective = effective_transformation(layer, x[None], every)[0]  # L(X)
    tokens = x.view(-1, 2)
    variation = torch.autograd.functional.jacobian(lambda one: (layer.mixing(one) @ tokens).flatten(), x)  # D L(.) X
    return Operators(derivative, effective, variation)


def signal() -> Tensor:
    """Return a smooth input, which varies little along the direction of the keys and much across it: [2t]."""
    at = torch.linspace(0, 2 * math.pi, TOKENS, dtype=torch.float64)
    along, across = torch.tensor([_DIRECTION, (-_DIRECTION[1], _DIRECTION[0])], dtype=torch.float64).unbind()
    return (0.4 * torch.sin(at)[:, None] * along + 2.5 * torch.cos(at)[:, None] * across).flatten()


def perturbation(seed: int, size: float) -> Tensor:
    """Draw a random step whose length is ``size`` times that of the signal: [2t]."""
    step = torch.randn(_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return step * (size * float(signal().norm() / step.norm()))


@dataclass(frozen=True)
class ToyOptions:
    """Options of the analysis.

    Attributes:
        gain: scale of queries and keys.
        step: length of the step relative to that of the input.
        seed: seed of the step.
    """

    gain: float = flag(GAIN, "Scale of queries and keys.")
    step: float = flag(STEP, "Length of the step, relative to the input.")
    seed: int = 0


@analysis("toy")
def analyze_toy_layer(options: ToyOptions) -> Section:
    """Show a layer whose derivative is mostly the variation of its own operator (figure 3)."""
    layer, x = ToyAttention(options.gain).eval(), signal()
    here, there = (operators(layer, at) for at in (x, x + perturbation(options.seed, options.step)))
    norms = [float(before.norm()) for before in here]
    changes = [float((after - before).norm()) for before, after in zip(here, there, strict=True)]
    rows: list[dict[str, Number]] = []
    cells: list[tuple[str, ...]] = []
    for title, norm, change in zip(_TITLES, norms, changes, strict=True):
        rows.append({"operator": title, "norm": norm, "change": change, "relative change": change / norm})
        cells.append((title, f"{norm:.2f}", f"{change:.2f}", f"{change / norm:.1%}"))
    gap = float((here.derivative - here.effective - here.variation).abs().max())
    facts = {"tokens": TOKENS, "gain": options.gain, "step": f"{options.step:.0%} of the input", "seed": options.seed}
    text = (
        f"A single head of self-attention over {TOKENS} tokens of two numbers. All three matrices are computed "
        f"independently of each other; derivative = effective + variation holds to {gap:.0e}. The norm of the "
        f"variation is {norms[2] / norms[1]:.1f} times that of the effective transformation, and after a step of "
        f"{options.step:.0%} of the input it has changed {changes[2] / changes[1]:.1f} times as much: the derivative "
        "shows the operator's variation and hides what the layer does."
    )
    table = ReportTable(("operator", "norm", "norm of the change", "relative change"), tuple(cells))
    caption = "Rows: the operators. Columns: at the input, after a small step, and the change. One scale for all."
    picture = ReportFigure("toy", draw_operators(here, there), caption)
    return Section("toy", "Operator variation in a small layer (figure 3)", text, facts, [table], rows, [picture])


def draw_operators(here: Operators, there: Operators) -> Drawing:
    """Draw three rows of matrices, all in one colour scale."""
    drawing = Drawing(figsize=(7.4, 6.9), layout="constrained")
    grid = drawing.subplots(3, 3)
    limit = float(max(here.derivative.abs().max(), there.derivative.abs().max()))
    for row, title, before, after in zip(grid, _TITLES, here, there, strict=True):
        for axes, values in zip(row, (before, after, after - before), strict=True):
            image = axes.imshow(values.numpy(), cmap="dave_signed", vmin=-limit, vmax=limit)
            axes.set_xticks([0, _SIZE - 1], ["1", str(_SIZE)], fontsize=8)
            axes.set_yticks([0, _SIZE - 1], ["1", str(_SIZE)], fontsize=8)
            axes.set_title(f"norm {float(values.norm()):.2f}", fontsize=9)
        row[0].set_ylabel(f"{title}\noutput", fontsize=9)
    for top, bottom, head in zip(grid[0], grid[-1], ("at the input X", "at X + a small step", "change"), strict=True):
        top.set_title(f"{head}\n{top.get_title()}", fontsize=9)
        bottom.set_xlabel("input", fontsize=8)
    drawing.colorbar(image, ax=list(grid.flat), shrink=0.6, label="entry of the matrix")
    return drawing
