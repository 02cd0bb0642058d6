"""Grids of images of distinct classes: choose the images and compose them.

Grids depend on the model, because they hold only images that it classifies with confidence; every method is scored on
the same grids.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dave_vit._internal.schema import Bounds, Checked, Count
from dave_vit.errors import InputError, OptionError

Cell = Literal["resize", "full"]


@dataclass(frozen=True)
class GridOptions(Checked):
    """Options of grids.

    Attributes:
        grids: how many.
        cells: cells along a side, 2 or 3.
        confidence: softmax probability of the label that an image must exceed; it must also be the predicted class.
        cell: "resize" shrinks the images so that a grid is as large as one image; "full" keeps their size.
        seed: of the draw of the classes.
    """

    grids: Count = 500
    cells: Annotated[int, Bounds(at_least=2)] = 2
    confidence: Annotated[float, Bounds(at_least=0, below=1)] = 0.95
    cell: Cell = "resize"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GridCandidate:
    """An image that may enter a grid: its index in the data set, its label and the model's confidence."""

    index: int
    label: int
    confidence: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Indices of images and their labels, cells in reading order."""

    images: tuple[int, ...]
    labels: tuple[int, ...]


def select_candidates(
    logits: Tensor, labels: Sequence[int | None], start: int = 0, confidence: float = 0.95
) -> list[GridCandidate]:
    """Return the images of a batch that the model classifies correctly with more than this softmax probability.

    Args:
        logits: [B,classes].
        labels: one per image; None is never taken.
        start: index of the first image in the data set.
        confidence: the probability to exceed.
    """
    top = logits.float().softmax(1).max(1)
    rows = enumerate(zip(top.indices.tolist(), top.values.tolist(), labels, strict=True), start)
    return [GridCandidate(i, k, p) for i, (k, p, label) in rows if k == label and p > confidence]


def choose_grids(pool: Sequence[GridCandidate], options: GridOptions | None = None) -> list[Grid]:
    """Choose grids of distinct classes: least used images first, and the most confident of each class first.

    No image is used twice while an unused one of another class remains. Empty where there are fewer classes than
    cells.
    """
    options = options or GridOptions()
    queues: dict[int, list[GridCandidate]] = {}
    for one in sorted(pool, key=lambda one: (-one.confidence, one.index)):
        queues.setdefault(one.label, []).append(one)
    if len(queues) < options.cells**2:
        return []
    draw = random.Random(options.seed)
    used = dict.fromkeys(sorted(queues), 0)
    grids = []
    for _ in range(options.grids):
        labels = draw.sample(list(used), len(used))
        labels = sorted(labels, key=lambda label: divmod(used[label], len(queues[label])))[: options.cells**2]
        draw.shuffle(labels)  # a class that was sorted to the end must not always be in the last cell
        grids.append(Grid(tuple(queues[k][used[k] % len(queues[k])].index for k in labels), tuple(labels)))
        for label in labels:
            used[label] += 1
    return grids


def compose_grids(images: Tensor, cell: Cell = "resize") -> Tensor:
    """Compose grids of K = n * n images: [B,K,C,H,W] -> [B,C,H,W], or [B,C,H*n,W*n] with ``cell="full"``."""
    side = round(images.shape[1] ** 0.5)
    if images.ndim != 5 or side * side != images.shape[1]:
        raise InputError(f"images shaped {list(images.shape)}; expected [B,K,C,H,W] with a square number K")
    if cell == "full":
        tiles = images.reshape(-1, side, side, *images.shape[2:]).permute(0, 3, 1, 4, 2, 5)  # [B,C,n,H,n,W]
        return tiles.flatten(4).flatten(2, 3)
    grid = torch.empty_like(images[:, 0])
    for k, (top, bottom, left, right) in enumerate(cell_bounds(side, (grid.shape[2], grid.shape[3]))):
        size = bottom - top, right - left
        resized = F.interpolate(images[:, k], size, mode="bilinear", antialias=True, align_corners=False)
        grid[:, :, top:bottom, left:right] = resized
    return grid


def cell_bounds(cells: int, size: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Return top, bottom, left, right of each cell in reading order; sizes may differ by a pixel."""
    if cells < 1:
        raise OptionError(f"grid of {cells} cells a side; expected 1 or more")
    rows, columns = ([round(side * i / cells) for i in range(cells + 1)] for side in size)
    return [(rows[i], rows[i + 1], columns[j], columns[j + 1]) for i in range(cells) for j in range(cells)]
