"""A world small enough for whole runs in tests: coloured squares, and a Vision Transformer that knows them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from dave_vit.evaluate import Plan
from dave_vit.evaluate.statistics.rows import read_tables
from dave_vit.models.architectures.vits import PlainViT  # and not timm's: each process of a run would import timm

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 60, 230),
    "sun": (240, 220, 50),
    "grey": (60, 60, 60),
}
SIDE = 32
GRIDS = 12  # of plans: three shards of them, the last one not full


def paint(root: Path, each: int = 4) -> Path:
    """Class folders of squares on noise, with a table of their boxes."""
    draw = np.random.default_rng(0)
    lines = ["image,left,top,right,bottom"]
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for number in range(each):
            pixels = draw.integers(100, 150, (40, 48, 3)).astype(np.uint8)
            top, left = draw.integers(2, 20, 2)
            pixels[top : top + 18, left : left + 18] = colour
            Image.fromarray(pixels).save(root / name / f"{number}.png")
            lines.append(f"{name}/{number}.png,{left},{top},{left + 18},{top + 18}")
    (root / "boxes.csv").write_text("\n".join(lines))
    return root


def preprocess(image: Image.Image) -> torch.Tensor:
    """Shorter side to 32, centre: [1,3,32,32]."""
    scale = SIDE / min(image.size)
    width, height = (max(SIDE, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    pixels = np.asarray(image.crop((left, top, left + SIDE, top + SIDE)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1


@lru_cache(maxsize=1)
def _vit(data: str) -> nn.Module:
    """A random Vision Transformer whose head is fitted to the squares."""
    torch.manual_seed(0)
    model = PlainViT(len(COLOURS), dim=32, depth=2, heads=2, size=SIDE, patch=8)
    paths = [path for name in sorted(COLOURS) for path in sorted((Path(data) / name).glob("*.png"))]
    images = torch.cat([preprocess(Image.open(path).convert("RGB")) for path in paths])
    labels = torch.tensor([sorted(COLOURS).index(path.parent.name) for path in paths])
    model.eval()
    with torch.no_grad():
        head, model.head = model.head, nn.Identity()
        features, model.head = model(images).double(), head
        features = torch.cat([features, torch.ones(len(features), 1)], 1)
        wanted = 24.0 * nn.functional.one_hot(labels).double()
        fitted = torch.linalg.lstsq(features, wanted, driver="gelsd").solution.float()  # [33, classes]
        model.head.weight.copy_(fitted[:-1].T)
        model.head.bias.copy_(fitted[-1])
    model.preprocess = preprocess
    model.class_names = sorted(COLOURS)
    return model


def load(entry, device):
    """The loader of plans whose model is ``square:FOLDER``."""
    return _vit(entry.spec.partition(":")[2]).to(device)


CALLS = itertools.count(1)  # of this process; a model that counts by itself would be another one after each pass


class _Fatal(nn.Module):
    """A model that kills its process once, in the middle of the run."""

    def __init__(self, model: nn.Module, mark: Path) -> None:
        super().__init__()
        self.model, self.mark = model, mark
        self.preprocess, self.class_names = model.preprocess, model.class_names

    def forward(self, x):
        if next(CALLS) == 8 and not self.mark.exists():
            self.mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return self.model(x)


def load_fatal(entry, device):
    """As ``load``; the first process that uses it for a while is killed."""
    folder = Path(entry.spec.partition(":")[2])
    return _Fatal(_vit(str(folder)), folder.parent / "killed")


def load_at_home(entry, device):
    """As ``load``, in the process of the run itself only."""
    if multiprocessing.parent_process() is not None:
        raise ValueError("not at home")
    return load(entry, device)


class _Slow(nn.Module):
    """A model that takes its time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.preprocess, self.class_names = model, model.preprocess, model.class_names

    def forward(self, x):
        time.sleep(0.5)
        return self.model(x)


def load_slow(entry, device):
    """As ``load``, and slow; each process leaves its number in a folder beside the data."""
    folder = Path(entry.spec.partition(":")[2])
    if multiprocessing.parent_process() is not None:
        (folder.parent / "workers").mkdir(exist_ok=True)
        (folder.parent / "workers" / str(os.getpid())).touch()
    return _Slow(_vit(str(folder)))


def quick_plan(folder: Path, **settings) -> Plan:
    """As ``build_plan``, for processes of their own: DAVE's first map in each would import torch's compiler."""
    return build_plan(
        folder, methods=["input_x_gradient", {"method": "smoothgrad", "options": {"samples": 3}}], **settings
    )


def build_plan(folder: Path, **settings) -> Plan:
    """A plan on a painted folder."""
    usual = {
        "models": f"square:{folder}",
        "methods": ["input_x_gradient", {"method": "dave", "options": {"samples": 3}}],
        "metrics": [
            {"metric": "gridpg", "options": {"grids": GRIDS}},
            "energypg",
            {"metric": "deletion", "options": {"steps": 4}},
        ],
        "data": f"folder:{folder}",
        "shard": 5,
        "batch": 3,
    }
    return Plan.load({**usual, **settings})


def read_rows(run: Path) -> list[dict]:
    """All rows of a run, in an order of their own and without what differs from run to run."""
    tables = read_tables(sorted((run / "rows").glob("*.parquet")))
    rows = [row for table in tables for row in table.drop_columns(["seconds", "map_seconds"]).to_pylist()]
    return sorted(rows, key=lambda row: (row["model"], row["method"], row["metric"], row["seed"], row["image"]))
