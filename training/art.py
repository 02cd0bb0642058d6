"""The training art as tensors: every style but the held-out family, trimmed, centred, at two sharpnesses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

HELD_OUT = "emojione"  # this family is never trained on
TESTED = ("noto", "fluent-emoji-flat", "twemoji")  # styles of the benchmark: drawn twice as often as the others
FAMILIES = {"noto": "google", "fluent-emoji-flat": "microsoft", "twemoji": "twitter", "emojione": "emojione"}
TEXTURES = ("brick", "gravel", "grass")
SIDE = 136  # side of a sprite's cell: 128 and a transparent border
_TABLE = 4096  # entries of each class's table of sprites; a draw is one look-up


@dataclass(frozen=True)
class Bank:
    """Sprites on the device.

    Attributes:
        art: [2, M, 4, SIDE, SIDE] premultiplied colours in 0..1; second: averaged over 2 x 2, for shrinking.
        shadow: [M, 1, SIDE, SIDE] blurred alpha.
        length: [M] longest side in pixels.
        area: [M] pixels of the silhouette.
        targets: [100, 4096] sprite numbers, each class's in the wanted proportions.
        distractors: [46, 4096] likewise.
        textures: [3, 256, 512] lower halves of the photographs in 0..1; the benchmark has the upper ones.
    """

    art: Tensor
    shadow: Tensor
    length: Tensor
    area: Tensor
    targets: Tensor
    distractors: Tensor
    textures: Tensor


def _cell(file: Path) -> tuple[np.ndarray, int]:
    """A sprite trimmed to its art and centred in its cell, premultiplied bytes [4, SIDE, SIDE], and its length."""
    with Image.open(file) as image:
        rgba = np.asarray(image.convert("RGBA")).astype(np.float32)
    solid = rgba[..., 3] >= 128
    rows, columns = np.flatnonzero(solid.any(axis=1)), np.flatnonzero(solid.any(axis=0))
    art = rgba[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    art[..., :3] *= art[..., 3:] / 255
    height, width = art.shape[:2]
    cell = np.zeros((SIDE, SIDE, 4), dtype=np.uint8)
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    cell[top : top + height, left : left + width] = np.rint(art)
    return cell.transpose(2, 0, 1), max(height, width)


def _table(icons: dict[str, list[str]], numbers: dict[str, int], rng: np.random.Generator) -> np.ndarray:
    """Sprite numbers of a class: styles in their proportions, icons of a style equally often."""
    weights = {}
    for style, names in icons.items():
        for name in names if style != HELD_OUT else []:
            weights[numbers[f"{style}__{name}"]] = (2 if style in TESTED else 1) / len(names)
    chances = np.array(list(weights.values()))
    return rng.choice(list(weights), size=_TABLE, p=chances / chances.sum())


def load_bank(folder: Path, device: torch.device, dtype: torch.dtype) -> Bank:
    """Reads the sprites ``STYLE__ICON.png`` and the textures from a folder."""
    classes = json.loads((Path(__file__).parent / "classes.json").read_text())
    files = sorted(file for file in folder.glob("*__*.png") if not file.name.startswith(f"{HELD_OUT}__"))
    cells, lengths = zip(*(_cell(file) for file in files), strict=True)
    numbers = {file.stem: number for number, file in enumerate(files)}
    rng = np.random.default_rng(1)
    groups = {
        group: torch.from_numpy(np.stack([_table(icons, numbers, rng) for icons in classes[group].values()]))
        for group in ("targets", "distractors")
    }
    photographs = [np.asarray(Image.open(folder / f"{name}.png").convert("L")) for name in TEXTURES]
    sharp = torch.from_numpy(np.stack(cells)).to(device).to(dtype) / 255  # [M, 4, SIDE, SIDE]
    alpha = sharp[:, 3:].float()
    blurred = F.avg_pool2d(F.avg_pool2d(alpha, 7, 1, 3), 7, 1, 3)
    soft = torch.cat([F.avg_pool2d(part.float(), 3, 1, 1) * 0.5 + part.float() * 0.5 for part in sharp.split(256)])
    return Bank(
        art=torch.stack([sharp, soft.to(dtype)]),
        shadow=blurred.to(dtype),
        length=torch.tensor(lengths, device=device, dtype=torch.float32),
        area=(alpha >= 0.5).flatten(1).sum(1).float(),
        targets=groups["targets"].to(device),
        distractors=groups["distractors"].to(device),
        textures=torch.from_numpy(np.stack([p[len(p) // 2 :] for p in photographs])).to(device).to(dtype) / 255,
    )
