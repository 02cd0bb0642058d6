"""The embedded models on the embedded benchmark: how much of a map lies on its object, method by method.

    python benchmarks/builtin.py --out benchmarks/results

Three scores, all in percent of a map's positive mass, with 95 % bootstrap intervals over grids or pictures:
GridPG (inside the own cell of a 2x2 grid), EnergyPG (on the exact mask of the labelled object), and, for pictures with
two labelled objects, the share on the explained one and on the other one. All methods see the same grids and pictures.
The file is written again after each method, so that a run that is stopped leaves what it has.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dave_vit import __version__, create_method, load_model
from dave_vit.data.builtin import compose_scene
from dave_vit.data.grids import GridOptions, choose_grids, compose_grids, select_candidates
from dave_vit.evaluate.statistics.intervals import MeanEstimate, estimate_means
from dave_vit.maps import collapse
from dave_vit.methods import Method
from dave_vit.metrics import energypg, gridpg
from dave_vit.models.families.builtin import BUILTIN
from dave_vit.viz.report_section import estimate_cell

# Shown name -> name and options of the method; the first of a model is compared with the others.
Methods = dict[str, tuple[str, dict[str, Any]]]
BEST: Methods = {"DAVE default": ("dave", {})}
RIVALS: Methods = {"input x gradient": ("input_x_gradient", {}), "SmoothGrad": ("smoothgrad", {})}
PAPER: Methods = {"DAVE paper": ("dave", {"preset": "paper"})}
CALM: Methods = {"DAVE, no rotation, t 0.15": ("dave", {"rotation": 0.0, "noise_level": 0.15})}
CALM_BCOS: Methods = {
    "DAVE, no rotation": ("dave", {"rotation": 0.0}),
    "DAVE, no rotation, shrinkage": ("dave", {"rotation": 0.0, "reducer": "shrinkage"}),
}
METHODS: dict[str, Methods] = {
    "builtin": BEST | {"effective transformation": ("effective", {})} | RIVALS | PAPER | CALM,
    "builtin-bcos": BEST | {"B-cos inherent": ("bcos", {})} | RIVALS | PAPER | CALM_BCOS,
}
SAMPLED = ("dave", "smoothgrad")


@dataclass(frozen=True)
class Pictures:
    """Composed pictures: bytes [N, 3, H, W], labels [N, K] and exact masks [N, K, H, W] of their K targets."""

    images: Tensor
    labels: Tensor
    masks: Tensor

    def first(self, count: int, device: torch.device) -> Pictures:
        return Pictures(*(part[:count].to(device) for part in (self.images, self.labels, self.masks)))


@dataclass(frozen=True)
class Task:
    """Inputs [N, C, H, W] with targets [N, K], and how the maps [n, K, H, W] of rows ``part`` are scored: [n, K]."""

    inputs: Tensor
    targets: Tensor
    score: Callable[[Tensor, slice], list[Tensor]]


@dataclass
class Result:
    """One method's scores, [N, K] each, and seconds per map."""

    scores: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0


def _scene(job: tuple[str, int]) -> tuple[np.ndarray, list[int], np.ndarray]:
    split, index = job
    scene = compose_scene(index, split)
    targets = scene.targets
    return scene.image.transpose(2, 0, 1), [one.label for one in targets], np.stack([one.mask for one in targets])


def make_pictures(split: str, count: int) -> Pictures:
    """The first pictures of a set of the benchmark, on all cores; call before the GPU's first use."""
    with multiprocessing.get_context("fork").Pool() as workers:
        found = workers.map(_scene, [(split, index) for index in range(count)], chunksize=8)
    images, labels, masks = zip(*found, strict=True)
    return Pictures(torch.from_numpy(np.stack(images)), torch.tensor(labels), torch.from_numpy(np.stack(masks)))


@torch.no_grad()
def grids_of(model: nn.Module, inputs: Tensor, labels: list[int], count: int) -> tuple[Tensor, Tensor]:
    """Grids [G, C, H, W] of pictures that the model is sure of, and the classes [G, 4] of their cells."""
    logits = torch.cat([model(part) for part in inputs.split(128)])
    chosen = choose_grids(select_candidates(logits, labels), GridOptions(grids=count))
    grids = torch.cat([compose_grids(inputs[list(grid.images)][None]) for grid in chosen])
    return grids, torch.tensor([grid.labels for grid in chosen], device=inputs.device)


def tasks(model: nn.Module, name: str, pool: Pictures, pairs: Pictures, options: argparse.Namespace) -> dict[str, Task]:
    """What every method of a model is scored on."""
    device, encode = torch.device(options.device), BUILTIN[name].encode
    inputs = encode(pool.images.to(device).float() / 255)
    grids, classes = grids_of(model, inputs, pool.labels[:, 0].tolist(), options.grids)
    single, double = pool.first(options.pictures, device), pairs.first(options.pairs, device)

    def on_mask(maps: Tensor, part: slice) -> list[Tensor]:
        return [energypg(maps[:, 0], single.masks[part, 0])[:, None]]

    def on_each(maps: Tensor, part: slice) -> list[Tensor]:
        masks = double.masks[part]
        return [energypg(maps.flatten(0, 1), regions.flatten(0, 1)).view(-1, 2) for regions in (masks, masks.flip(1))]

    return {
        "GridPG": Task(grids, classes, lambda maps, part: [gridpg(maps)]),
        "EnergyPG": Task(inputs[: options.pictures], single.labels, on_mask),
        "pair": Task(encode(double.images.float() / 255), double.labels, on_each),
    }


def score(method: Method, task: Task, size: int) -> list[np.ndarray]:
    """Scores [N, K] of a method, one array for each score of the task."""
    parts = []
    for start in range(0, len(task.inputs), size):
        part = slice(start, start + size)
        attribution = method.attribute(task.inputs[part], task.targets[part])  # [n, K, C, H, W]
        maps = collapse(attribution.flatten(0, 1)).unflatten(0, attribution.shape[:2])
        parts.append(task.score(maps, part))
    return [torch.cat(column).cpu().double().numpy() for column in zip(*parts, strict=True)]


def measure(method: Method, work: dict[str, Task], size: int) -> Result:
    """All scores of a method."""
    result, start = Result(), time.perf_counter()
    for name, task in work.items():
        names = ("own object", "other object") if name == "pair" else (name,)
        result.scores |= dict(zip(names, score(method, task, size), strict=True))
    result.seconds = (time.perf_counter() - start) / sum(task.targets.numel() for task in work.values())
    return result


def run(name: str, pool: Pictures, pairs: Pictures, options: argparse.Namespace) -> Iterator[dict[str, Result]]:
    """The results of a model so far, after each method."""
    model = load_model(name, device=options.device)
    work = tasks(model, name, pool, pairs, options)
    results: dict[str, Result] = {}
    for shown, (method, settings) in METHODS[name].items():
        if options.only and shown not in options.only:
            continue
        sampled = {"samples": options.samples} if method in SAMPLED else {}
        results[shown] = measure(create_method(method, model, **settings, **sampled), work, options.batch)
        yield results


# --- The report -------------------------------------------------------------------------------------------------------


def estimate(values: np.ndarray) -> MeanEstimate:
    """Mean and interval of scores [N, K] in percent; the K numbers of a grid or picture are drawn together."""
    count, each = values.shape
    units = np.repeat(np.arange(count), each).tolist()
    return estimate_means(100 * values.reshape(1, -1), units)[0]


def cell(one: MeanEstimate) -> str:
    return estimate_cell(one.mean, one.low, one.high, digits=1).format()


def table(results: dict[str, Result]) -> list[str]:
    """One line per method."""
    names = list(next(iter(results.values())).scores)
    lines = ["| method | " + " | ".join(names) + " | ms per map |", "|---" * (len(names) + 2) + "|"]
    for shown, result in results.items():
        cells = [cell(estimate(result.scores[name])) for name in names]
        lines.append(f"| {shown} | " + " | ".join(cells) + f" | {1e3 * result.seconds:.1f} |")
    return lines


def differences(results: dict[str, Result]) -> list[str]:
    """The first method against the others: paired differences, and whether the intervals above overlap."""
    (first, best), *others = results.items()
    lines = [f"| {first} minus | GridPG | EnergyPG | intervals apart |", "|---|---|---|---|"]
    for shown, other in others:
        cells, apart = [], []
        for name in ("GridPG", "EnergyPG"):
            cells.append(cell(estimate(best.scores[name] - other.scores[name])))
            mine, theirs = estimate(best.scores[name]), estimate(other.scores[name])
            apart.append("yes" if (mine.low or 0) > (theirs.high or 0) else "no")
        lines.append(f"| {shown} | " + " | ".join(cells) + f" | {', '.join(apart)} |")
    return lines if others else []


def dropped(results: dict[str, Result]) -> str:
    """How many maps had no score, since they had no positive mass."""
    counts = {shown: sum(int(np.isnan(s).sum()) for s in r.scores.values()) for shown, r in results.items()}
    some = [f"{count} of {shown}" for shown, count in counts.items() if count]
    return f"Scores without a value (no positive mass): {', '.join(some) or 'none'}."


def report(found: dict[str, dict[str, Result]], areas: dict[str, float], options: argparse.Namespace) -> str:
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    lines = [
        "# The embedded models on the embedded benchmark",
        "",
        f"dave-vit {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {where}, float32.",
        f"{options.grids} grids out of {options.pool} pictures (softmax above 0.95), {options.pictures} pictures with "
        f"one labelled object, {options.pairs} with two; T = {options.samples}; no smoothing; targets are the labels.",
        f"By chance: GridPG 25.0, EnergyPG {areas['EnergyPG']:.1f}, own and other object {areas['pair']:.1f} (area).",
        "",
        f"`python benchmarks/builtin.py --grids {options.grids} --pictures {options.pictures} --pairs {options.pairs} "
        f"--pool {options.pool} --samples {options.samples}`",
    ]
    for name, results in found.items():
        lines += ["", f"## {name}", "", *table(results), "", *differences(results), "", dropped(results)]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(METHODS), help="with commas between")
    parser.add_argument("--only", action="append", help="a method as the tables name it; may be repeated")
    parser.add_argument("--grids", type=int, default=200)
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--pool", type=int, default=1000, help="pictures that grids are made of")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for the Markdown file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    began = time.perf_counter()
    pool = make_pictures("single", max(options.pool, options.pictures))
    pairs = make_pictures("pair", options.pairs)
    areas = {
        "EnergyPG": 100 * float(pool.masks[: options.pictures].float().mean()),
        "pair": 100 * float(pairs.masks.float().mean()),
    }
    print(f"[{time.perf_counter() - began:5.1f} s] pictures composed", flush=True)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    file = re.sub(r"[^a-z0-9.]+", "-", f"builtin-{where}-torch{torch.__version__}".lower()) + ".md"
    found: dict[str, dict[str, Result]] = {}
    for name in options.models.split(","):
        for results in run(name, pool, pairs, options):
            found[name] = results
            shown = list(results)[-1]
            print(f"[{time.perf_counter() - began:5.1f} s] {name}: {table({shown: results[shown]})[-1]}", flush=True)
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / file).write_text(report(found, areas, options))
    print(report(found, areas, options))


if __name__ == "__main__":
    main()
