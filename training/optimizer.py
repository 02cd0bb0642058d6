"""AdamW, alone or with Muon for the blocks' matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

_BLOCKS = ("blocks.", "transformer.")


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Each of [k, rows, columns] with its singular values brought near 1, by a Newton-Schulz iteration."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices  # a rough answer is enough
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum with orthogonalised updates (Jordan, 2024), scaled to AdamW's step size (Liu et al., 2025).

    Matrices of one shape are updated together; a matrix named qkv counts as three.
    """

    def __init__(self, named: list[tuple[str, Tensor]], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for name, parameter in named:
            key = (3 if "qkv" in name else 1, *parameter.shape)
            self.groups.setdefault(key, []).append(parameter)
        self.buffers = [torch.zeros(len(group), *key[1:], device=group[0].device) for key, group in self.groups.items()]

    @torch.no_grad()
    def step(self, rate: float, decay: float) -> None:
        """One update of every matrix."""
        for ((parts, rows, columns), group), buffer in zip(self.groups.items(), self.buffers, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum).reshape(-1, rows // parts, columns))
            scale = rate * 0.2 * math.sqrt(max(rows // parts, columns))
            torch._foreach_mul_(group, 1 - rate * decay)
            torch._foreach_add_(group, list(update.reshape(buffer.shape).float().unbind()), alpha=-scale)


class Optimizer:
    """The whole model's optimizer; ``muon`` says who updates the matrices of the blocks."""

    def __init__(self, model: nn.Module, *, muon: bool, decay: float) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [(n, p) for n, p in named if muon and p.ndim == 2 and n.startswith(_BLOCKS)]
        taken = {name for name, _ in matrices}
        rest = [(name, p) for name, p in named if name not in taken]
        decayed = [p for n, p in rest if p.ndim >= 2 and "pos_embed" not in n and "token" not in n]
        kept = [p for n, p in rest if not (p.ndim >= 2 and "pos_embed" not in n and "token" not in n)]
        groups = [{"params": decayed, "weight_decay": decay}, {"params": kept, "weight_decay": 0.0}]
        fused = named[0][1].is_cuda
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3, betas=(0.9, 0.98), fused=fused)
        self.muon = Muon(matrices) if matrices else None
        self.decay = decay

    def step(self, rate: float) -> None:
        """One update at this learning rate."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        if self.muon:
            self.muon.step(rate, self.decay)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"adam": self.adam.state_dict(), "muon": self.muon.buffers if self.muon else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where another run stopped."""
        self.adam.load_state_dict(state["adam"])
        for buffer, saved in zip(self.muon.buffers if self.muon else [], state["muon"], strict=True):
            buffer.copy_(saved)
