"""Prints the numbers of a model card: accuracy by family, calibration, sensitivity to noise and to rotation.

    PYTHONPATH=src python training/card.py --model builtin

The pictures have a seed of their own, which neither training nor the choice of its settings ever looked at.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from art import FAMILIES
from torch import Tensor

from dave_vit import load_model
from dave_vit.data.builtin import compose_scene
from dave_vit.models import Adapter
from dave_vit.models.families.builtin import BUILTIN

SEED = 40_000
BINS = 15
NOISE = (0.0, 0.1, 0.2, 0.3, 0.5)  # standard deviations, colours in 0..1
ANGLES = (0, 10, 20, 45, 90, 180)  # degrees


def pictures(family: str, count: int, seed: int) -> tuple[Tensor, Tensor, list[str]]:
    """Colours [N, 3, H, W] in 0..1, labels [N] and design families of cluttered pictures with one target."""
    scenes = [compose_scene(index, family=family, seed=seed) for index in range(count)]
    images = torch.stack([torch.from_numpy(scene.image).permute(2, 0, 1) for scene in scenes])
    labels = torch.tensor([scene.objects[0].label for scene in scenes])
    return images.float() / 255, labels, [FAMILIES[scene.objects[0].style] for scene in scenes]


@torch.inference_mode()
def logits_of(model: Adapter, images: Tensor) -> Tensor:
    """Logits [N, classes] of colours [N, 3, H, W] in 0..1."""
    encode, device = BUILTIN[model.spec].encode, next(model.parameters()).device
    return torch.cat([model(encode(part.to(device))).cpu() for part in images.split(50)])


def calibration_error(confidence: Tensor, right: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: |accuracy - confidence| over bins of equal width, weighted by their pictures."""
    place = (confidence * bins).long().clamp(max=bins - 1)
    gaps = [(right[place == i].double() - confidence[place == i].double()).sum().abs() for i in range(bins)]
    return float(torch.stack(gaps).sum() / len(confidence))


def turned(images: Tensor, degrees: float) -> Tensor:
    """Whole pictures turned about their centre, bilinear, mirrored beyond the edges."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    matrix = torch.tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(images), 2, 3)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def noisy(images: Tensor, level: float) -> Tensor:
    """With Gaussian noise, the same draws on every machine, not cut off at 0 and 1."""
    return images + level * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))


def interval(right: Tensor) -> str:
    """Accuracy in percent with Wilson's 95 % interval."""
    n, p, z = len(right), float(right.double().mean()), 1.96
    middle, reach = (p + z * z / (2 * n)) / (1 + z * z / n), z * math.sqrt(p * (1 - p) / n + (z / n) ** 2 / 4)
    reach /= 1 + z * z / n
    return f"{100 * p:.1f} [{100 * (middle - reach):.1f}, {100 * (middle + reach):.1f}]"


def accuracy_lines(logits: Tensor, labels: Tensor, families: list[str]) -> list[str]:
    """Accuracy, mean confidence and calibration error: all pictures, then each design family."""
    right, confidence = logits.argmax(1) == labels, logits.double().softmax(1).amax(1)
    groups = {"all": [True] * len(families)} if len(set(families)) > 1 else {}
    groups |= {family: [own == family for own in families] for family in sorted(set(families))}
    lines = []
    for name, chosen in groups.items():
        rows = torch.tensor(chosen)
        error = calibration_error(confidence[rows], right[rows])
        cells = [str(sum(chosen)), interval(right[rows]), f"{100 * float(confidence[rows].mean()):.1f}", f"{error:.3f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def sensitivity_lines(
    model: Adapter, images: Tensor, labels: Tensor, levels: tuple[float, ...], change: Callable[[Tensor, float], Tensor]
) -> list[str]:
    """Accuracy and mean confidence after a change of several strengths."""
    lines = []
    for level in levels:
        logits = logits_of(model, change(images, level))
        confidence = 100 * float(logits.double().softmax(1).amax(1).mean())
        lines.append(f"| {level:g} | {interval(logits.argmax(1) == labels)} | {confidence:.1f} |")
    return lines


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(BUILTIN), required=True)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--seen", type=int, default=400, help="pictures of seen designs")
    parser.add_argument("--unseen", type=int, default=200, help="pictures of the unseen design")
    parser.add_argument("--changed", type=int, default=200, help="pictures of seen designs that noise and turns change")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    """Prints the tables."""
    options = parse()
    model = load_model(options.model, device=options.device)
    lines = ["| design | pictures | top-1 | mean confidence | calibration error |", "|---|---|---|---|---|"]
    seen = pictures("seen", options.seen, options.seed)
    lines += accuracy_lines(logits_of(model, seen[0]), *seen[1:])
    unseen = pictures("unseen", options.unseen, options.seed)
    lines += accuracy_lines(logits_of(model, unseen[0]), *unseen[1:])
    images, labels = seen[0][: options.changed], seen[1][: options.changed]
    lines += ["", "| noise | top-1 | mean confidence |", "|---|---|---|"]
    lines += sensitivity_lines(model, images, labels, NOISE, noisy)
    lines += ["", "| rotation | top-1 | mean confidence |", "|---|---|---|"]
    lines += sensitivity_lines(model, images, labels, ANGLES, turned)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
