"""Measure how often the embedded models call images out of domain: their own (false alarms), and photographs.

python benchmarks/out_of_domain.py --photos FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from dave_vit import load_model
from dave_vit.data import open_dataset
from dave_vit.data.images import SUFFIXES, read_image
from dave_vit.models import Adapter
from dave_vit.models.adapter import is_out_of_domain


def share(model: Adapter, pictures: Sequence[Image.Image]) -> float:
    """Return the fraction of images that are called out of domain."""
    flags = []
    for start in range(0, len(pictures), 16):
        with torch.inference_mode():
            flags.append(is_out_of_domain(model, model(model.preprocess(pictures[start : start + 16]))))
    return float(torch.cat(flags).float().mean())


def embedded(split: str, family: str, seed: int, count: int) -> list[Image.Image]:
    """Return images of the embedded benchmark, each once."""
    step = 2 if split == "pair" else 1  # a picture of two targets is two items
    data = open_dataset(f"builtin:{split}:{family}:{seed}", limit=step * count)
    return [data.image(index) for index in range(0, step * count, step)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", help="a folder of photographs, with its subfolders")
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--count", type=int, default=300)
    given = parser.parse_args()
    kinds = [("single", "seen"), ("pair", "seen"), ("plain", "seen"), ("single", "unseen")]
    sets = {" ".join(kind): embedded(*kind, given.seed, given.count) for kind in kinds}
    if given.photos:
        files = [path for path in sorted(Path(given.photos).rglob("*")) if path.suffix.lower() in SUFFIXES]
        sets["photographs"] = [read_image(path).image for path in files]
    print("| pictures | number | builtin | builtin-bcos |\n|---|---|---|---|")
    models = [load_model(spec) for spec in ("builtin", "builtin-bcos")]
    for name, pictures in sets.items():
        shares = " | ".join(f"{share(model, pictures):.1%}" for model in models)
        print(f"| {name} | {len(pictures)} | {shares} |")


if __name__ == "__main__":
    main()
