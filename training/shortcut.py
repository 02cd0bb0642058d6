r"""Trains a small Vision Transformer on images with planted shortcuts, so that it uses some of them.

    python training/shortcut.py --percent 80 --out shortcut.safetensors
    dave audit --model timm:test_vit --weights shortcut.safetensors --plugin training/shortcuts.py \
        --data shortcut:80:1 --out audit

Two minutes on one core. The model is timm's `test_vit` (0.4 million weights) from random weights; seed 0 of the data is
for training, every other seed for audits. Images without cues (`--percent 0`) give the clean model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from shortcuts import SHORTCUT_CLASSES, compose_shortcut
from torch import Tensor, nn

ARCHITECTURE = "test_vit"
CROP = slice(4, -4)  # what timm's preprocessing of test_vit leaves of 168 pixels
BATCH = 50


def images(percent: int, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns images [N, 3, 160, 160] as bytes, and their labels [N]."""
    scenes = [compose_shortcut(index, percent, seed) for index in range(count)]
    pixels = np.stack([scene.image[CROP, CROP] for scene in scenes])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.tensor([scene.label for scene in scenes])


def encode(pixels: Tensor) -> Tensor:
    """Returns bytes as the model takes them."""
    return pixels.float() / 127.5 - 1


def train(model: nn.Module, pixels: Tensor, labels: Tensor, epochs: int, seed: int) -> None:
    """Trains all weights with AdamW and a schedule of one cycle."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    steps = epochs * -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.15)
    began = time.monotonic()
    for epoch in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(labels), generator=draw).split(BATCH):
            loss = F.cross_entropy(model(encode(pixels[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(chosen)
        sys.stdout.write(f"epoch {epoch + 1}: loss {total / len(labels):.3f}, {time.monotonic() - began:.0f} s\n")
        sys.stdout.flush()


@torch.inference_mode()
def accuracy(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """Returns the accuracy in each class, [classes]."""
    right = torch.cat([model(encode(part)).argmax(1) for part in pixels.split(100)]) == labels
    return torch.stack([right[labels == label].float().mean() for label in range(len(SHORTCUT_CLASSES))])


def build(percent: int, count: int, epochs: int, seed: int, data_seed: int = 0) -> nn.Module:
    """Builds and trains the model."""
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = timm.create_model(ARCHITECTURE, num_classes=len(SHORTCUT_CLASSES))
        train(model.train(), *images(percent, data_seed, count), epochs, seed)
    return model.eval()


def save(model: nn.Module, path: Path) -> None:
    """Writes a file that `--model timm:test_vit --weights FILE` takes."""
    from safetensors.torch import save_file

    names = json.dumps(list(SHORTCUT_CLASSES))
    save_file(model.state_dict(), path, {"format": "pt", "architecture": ARCHITECTURE, "class_names": names})


def main() -> None:
    """Trains, prints accuracies with and without cues, and writes the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--percent", type=int, default=80, help="images of a class that have its cue")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = build(options.percent, options.images, options.epochs, options.seed)
    for percent in (100, 0):
        shares = accuracy(model, *images(percent, 9, 300))
        text = ", ".join(f"{name} {share:.2f}" for name, share in zip(SHORTCUT_CLASSES, shares, strict=True))
        sys.stdout.write(f"accuracy with cues in {percent} %: {text}\n")
    save(model, options.out)


if __name__ == "__main__":
    main()
