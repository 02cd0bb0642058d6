"""Which neighbourhood and which estimator make the best map: the measurement behind the preset `default`.

    python benchmarks/estimators.py prepare FILE --data imagenet:DIR --model timm:NAME --weights FILE
    python benchmarks/estimators.py measure FILE --out results.md

`prepare` writes images, labels, regions and grids into one file, so that `measure` runs on a machine without the data.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dave_vit import DAVE, __version__, load_model
from dave_vit.data import open_dataset
from dave_vit.data.batches import load_batch
from dave_vit.data.geometry import GeometryCache
from dave_vit.data.grids import GridOptions, choose_grids, compose_grids, select_candidates
from dave_vit.maps import collapse
from dave_vit.metrics import deletion, energypg, gridpg
from dave_vit.metrics.perturbation import Perturbation, area

TIMES = (8, 16, 50)
SETTINGS: dict[str, dict[str, Any]] = {
    "paper, t 0.5": {"noise_level": 0.5},
    "t 0.3": {"noise_level": 0.3},
    "t 0.15": {"noise_level": 0.15},
    "t 0.3, antithetic": {"noise_level": 0.3, "antithetic": True},
    "no noise": {"noise": "none"},
    "t 0.3, no rotation": {"noise_level": 0.3, "rotation": 0.0},
    "t 0.15, no rotation": {"noise_level": 0.15, "rotation": 0.0},
    "t 0.3, rotation 10": {"noise_level": 0.3, "rotation": 10.0},
    "t 0.2, rotation 10": {"noise_level": 0.2, "rotation": 10.0},
    "t 0.2, rotation 5, translation 0.05": {"noise_level": 0.2, "rotation": 5.0, "translation": 0.05},
}


@dataclass(frozen=True)
class Keep:
    """A reducer that keeps the channel sums of all samples, so that estimators can be compared on the same draws."""

    samples: list[Tensor] = field(default_factory=list)

    def accumulator(self) -> Keep:
        return self

    @property
    def count(self) -> int:
        return sum(len(part) for part in self.samples)

    def update(self, samples: Tensor) -> None:
        self.samples.append(collapse(samples.flatten(0, 1)).unflatten(0, samples.shape[:2]))

    def attribution(self) -> Tensor:
        return torch.cat(self.samples).mean(0)[:, None]

    def standard_error(self) -> Tensor:
        return torch.cat(self.samples).std(0)


def estimators(samples: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Maps [B, H, W] out of samples [T, B, H, W]."""
    mean, error = samples.mean(0), samples.std(0) / len(samples) ** 0.5
    z = torch.where(error > 0, mean / error, 0.0)  # significance of each pixel
    yield "mean", mean
    yield "shrinkage", mean * (1 - z.square().reciprocal()).clamp_min(0)
    for k in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        yield f"soft {k:g}", mean.sign() * (mean.abs() - k * error).clamp_min(0)
    for k in (1.0, 2.0, 3.0, 4.0, 6.0):
        yield f"wiener {k:g}", mean * z.square() / (z.square() + k**2)
    for k in (1.0, 2.0, 3.0, 4.0):
        yield f"quartic {k:g}", mean * z**4 / (z**4 + k**4)


@dataclass(frozen=True)
class Prepared:
    """Everything that is measured on."""

    inputs: Tensor  # correct images with regions under half of the picture: [N, C, H, W]
    labels: Tensor
    regions: Tensor
    grids: Tensor  # [G, C, H, W]
    grid_labels: Tensor  # [G, 4]


def prepare(options: argparse.Namespace) -> None:
    """Choose images and grids with the model and store the pictures in 8 bits, which loses nothing."""
    model = load_model(options.model, weights=options.weights)
    black, white = (model.preprocess(Image.new("RGB", (256, 256), shade))[:, :, :1, :1] for shade in ("black", "white"))
    pool, parts, correct = [], [], 0
    data, geometries = open_dataset(options.data, limit=options.limit), GeometryCache(model.preprocess)
    for start in range(0, len(data), 32):
        batch = load_batch(data, range(len(data))[start : start + 32], geometries)
        with torch.no_grad():
            logits = model(batch.inputs)
        labels = torch.tensor(batch.labels)
        right = logits.argmax(1) == labels
        correct += int(right.sum())
        pool += select_candidates(logits, batch.labels, sum(len(part[1]) for part in parts), options.confidence)
        share = batch.regions.float().mean((1, 2))
        pictures = ((batch.inputs - black) / (white - black) * 255).round().byte()
        parts.append((pictures, labels, batch.regions, right & (share > 0) & (share < 0.5)))
    pictures, labels, regions, chosen = (torch.cat(column) for column in zip(*parts, strict=True))
    grids = choose_grids(pool, GridOptions(grids=options.grids, confidence=options.confidence))
    cells = torch.tensor([grid.images for grid in grids])
    used, where = torch.cat([chosen.nonzero()[:, 0], cells.flatten()]).unique(return_inverse=True)
    np.savez_compressed(
        options.file,
        pictures=pictures[used].numpy(),
        black=black.numpy(),
        white=white.numpy(),
        images=where[: int(chosen.sum())].numpy(),
        cells=where[int(chosen.sum()) :].reshape(cells.shape).numpy(),
        labels=labels[used].numpy(),
        regions=regions[chosen].numpy(),
    )
    print(f"top-1 {correct} of {len(labels)}; {int(chosen.sum())} images, {len(grids)} grids of {len(pool)} candidates")


def load(file: Path, device: torch.device) -> Prepared:
    """The stored pictures as the model takes them."""
    stored = {key: torch.from_numpy(value).to(device) for key, value in np.load(file).items()}
    inputs = stored["black"] + stored["pictures"].float() / 255 * (stored["white"] - stored["black"])
    images, cells = stored["images"], stored["cells"]
    grids = torch.cat([compose_grids(inputs[some]) for some in cells.split(16)])
    return Prepared(inputs[images], stored["labels"][images], stored["regions"], grids, stored["labels"][cells])


def samples_of(model: nn.Module, inputs: Tensor, target: Tensor, switches: dict[str, Any]) -> Tensor:
    """Channel sums of the samples: [T, B * K, H, W]."""
    keep = Keep()
    DAVE(model, samples=max(TIMES), preset="paper", reducer=keep, **switches).explain(inputs, target)
    return torch.cat(keep.samples)


def scores(
    model: nn.Module, data: Prepared, switches: dict[str, Any], size: int = 32
) -> dict[tuple[int, str], list[float]]:
    """GridPG, EnergyPG and deletion of each estimator at each T."""
    found: dict[tuple[int, str], dict[str, list[Tensor]]] = {}
    how = Perturbation(fractions=tuple(step / 20 for step in range(19)))
    for start in range(0, len(data.inputs), size):
        part = slice(start, start + size)
        inputs, labels = data.inputs[part], data.labels[part]
        samples = samples_of(model, inputs, labels, switches)
        for count in TIMES:
            for name, maps in estimators(samples[:count]):
                into = found.setdefault((count, name), {"grid": [], "energy": [], "deletion": []})
                into["energy"].append(energypg(maps, data.regions[part]))
                if count == max(TIMES) or name in ("mean", "soft 2", "wiener 2", "wiener 4"):
                    curve = deletion(model, inputs, maps, labels, how)
                    into["deletion"].append(area(curve, how.fractions))
    for start in range(0, len(data.grids), size):
        part = slice(start, start + size)
        samples = samples_of(model, data.grids[part], data.grid_labels[part], switches)
        for count in TIMES:
            for name, maps in estimators(samples[:count]):
                found[count, name]["grid"].append(gridpg(maps.unflatten(0, (-1, 4))).flatten())
    return {
        key: [100 * float(torch.cat(parts).nanmean()) if parts else float("nan") for parts in values.values()]
        for key, values in found.items()
    }


def measure(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    model = load_model(options.model, weights=options.weights).to(device)
    data = load(options.file, device)
    lines = [
        f"dave-vit {__version__}, torch {torch.__version__}, {device}; {options.model}, {len(data.inputs)} images, "
        f"{len(data.grids)} grids. Cells: GridPG / EnergyPG / deletion (area under 0 to 90 %).\n",
        "| neighbourhood | estimator | " + " | ".join(f"T = {t}" for t in TIMES) + " |",
        "|---" * (2 + len(TIMES)) + "|",
    ]
    chosen = {k: v for k, v in SETTINGS.items() if not options.only or k in options.only}
    for setting, switches in chosen.items():
        found = scores(model, data, switches)
        for name in dict.fromkeys(name for _, name in found):
            cells = [" / ".join(f"{value:.1f}" for value in found[count, name]) for count in TIMES]
            lines.append(f"| {setting} | {name} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["prepare", "measure"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", default="builtin")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--weights", default=None)
    parser.add_argument("--confidence", type=float, default=0.8)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--grids", type=int, default=200)
    parser.add_argument("--only", action="append", help="one of the neighbourhoods; may be repeated")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    {"prepare": prepare, "measure": measure}[options.step](options)


if __name__ == "__main__":
    main()
